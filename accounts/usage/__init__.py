"""Usage and money: pages of calls, sums, exports, prices, budgets and their webhooks, and how long all is kept."""
