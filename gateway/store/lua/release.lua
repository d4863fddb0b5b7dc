-- Gives a slot back and hands it straight to the next ticket.
--
--   ARGV[4]  id of the lease
--   ARGV[5]  its fencing token
-- Result: {1, leases of that worker} | {0, 0} when there is no lease with that token: then nothing was changed
--
-- Keeps: while a ticket waits that could use it, no slot is free.
local lease = redis.call("HMGET", lease_key(ARGV[4]), "fence", "worker")
if lease[1] ~= ARGV[5] then return {0, 0} end
lease_drop(lease[2], ARGV[4])
grant({lease[2]})
return {1, leases_count(lease[2])}
