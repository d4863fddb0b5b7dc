-- Removes calls that were given up, whether they have a ticket, a grant or a lease.
--
--   ARGV[4+]  ids of tickets or leases of this gateway
-- Result: how many of the ids were known
--
-- Keeps: nothing of a withdrawn id is left, its team is charged nothing, and its slot goes to a ticket that waits. Ids
-- of other gateways are not touched.
local call_drop = select(2, tickets())
local known, freed = 0, {}
for i = 4, #ARGV do
  local id = ARGV[i]
  local text = call_read(id)
  local lease = lease_read(text)
  if (lease and lease.gateway or ticket_read(text)) == GATEWAY then
    freed[#freed + 1] = call_drop(id, text)
    known = known + 1
  end
end
if #freed > 0 then line()(freed) end
ledger_save()
return known
