-- Removes calls that were given up, whether they have a ticket, a grant or a lease.
--
--   ARGV[4+]  ids of tickets or leases of this gateway
-- Result: how many of the ids were known
--
-- Keeps: nothing of a withdrawn id is left, its team is charged nothing, and its slot goes to a ticket that waits. Ids
-- of other gateways are not touched.
local known, freed = 0, {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local lease = redis.call("HMGET", lease_key(id), "gateway", "worker", "team", "share")
  local filed = redis.call("HGET", ticket_key(id), "gateway") == GATEWAY
  if filed then ticket_drop(id) end
  if lease[1] == GATEWAY then
    lease_drop(lease[2], id)
    charge_rest(lease[3], -(tonumber(lease[4]) or 0))
    freed[#freed + 1] = lease[2]
  end
  if filed or lease[1] == GATEWAY then known = known + 1 end
end
if #freed > 0 then grant(freed) end
return known
