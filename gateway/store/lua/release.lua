-- Gives a slot back and hands it straight to the ticket that loses most by waiting.
--
--   ARGV[4]  id of the lease
--   ARGV[5]  its fencing token
--   ARGV[6]  what the call took, virtual tokens; empty: what it was charged
-- Result: 1, or 0 when there is no lease with that token: then nothing was changed
--
-- Keeps: while one of the first WINDOW x WINDOWS tickets is better off with it than without, no slot is free.
local lease = redis.call("HMGET", lease_key(ARGV[4]), "fence", "worker", "team", "share", "kv")
if lease[1] ~= ARGV[5] then return 0 end
local full = lease_drop(lease[2], ARGV[4], {lease[5], lease[3], lease[4]})
if ARGV[6] ~= "" and lease[4] then charge_rest(lease[3], tonumber(ARGV[6]) - tonumber(lease[4])) end
if full then
  -- It was lent one beyond its slots, as maybe the next one is.
  lend_to_line(WINDOWS * WINDOW)
else
  grant({lease[2]})
end
return 1
