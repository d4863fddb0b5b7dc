"""Parts of the accounts service that need neither database nor Redis."""
