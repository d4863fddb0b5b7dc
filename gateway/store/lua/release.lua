-- Gives a slot back, and grants it at once to the ticket that loses most by waiting.
--
--   ARGV[4]  id of the lease
--   ARGV[5]  its fencing token
--   ARGV[6]  virtual tokens that the call took; empty: as many as it was charged
-- Result: 1, or 0 if there is no lease with that token, and nothing was changed
--
-- Keeps: no slot is free while one of the first WINDOW x WINDOWS tickets is better off with it than without.
local lease = redis.call("HMGET", lease_key(ARGV[4]), "fence", "worker", "team", "share", "kv")
if lease[1] ~= ARGV[5] then return 0 end
local full = lease_drop(lease[2], ARGV[4], {lease[5], lease[3], lease[4]})
if ARGV[6] ~= "" and lease[4] then charge_rest(lease[3], tonumber(ARGV[6]) - tonumber(lease[4])) end
if full then
  -- The lease was beyond the worker's slots; perhaps another ticket is owed that place.
  lend_to_line(WINDOWS * WINDOW)
else
  grant({lease[2]})
end
return 1
