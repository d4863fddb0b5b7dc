"""The usage of calls: pages, sums, exports, LiteLLM's spend logs, and how long all is kept."""
