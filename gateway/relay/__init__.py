"""The connection to the workers: submit and cancel by POST, answers over one event stream per worker process."""
