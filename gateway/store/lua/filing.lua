-- Files tickets: the body of a function of some scripts, after shared.lua.

-- Returns the workers that are not known to have all their slots leased, by one read for all. A worker that has
-- restarted with more slots may be missed, until its old leases are swept.
local function perhaps_open(workers)
  local open, fields = {}, {}
  for at, worker in ipairs(workers) do fields[at] = "w:" .. worker end
  if #fields > 0 then ledger_load(fields) end
  for at, worker in ipairs(workers) do
    local _, leases, _, slots = leased_read(ledger_get(fields[at]))
    if not leases or leases < slots then open[#open + 1] = worker end
  end
  return open
end

-- Returns the record of a ticket of this gateway. `within`: ms to its deadline; 0: none. `bids`: the lines about
-- workers, made by its gateway.
local function ticket_text(within, bids, start, rank, share, weight, at, team)
  local deadline = tonumber(within) > 0 and now + tonumber(within) or 0
  return format("%d\n%s\n%s\n%s %s %s %s %s\n%s", deadline, bids, GATEWAY, start, rank, share, weight, at, team)
end

-- Puts a ticket in the line at its rank. The caller counts it for its team.
local function ticket_file(id, text, rank, ttl)
  call("HSET", calls_key, id, text)
  ticket_queue(id, rank)
  call("ZADD", tickets_key, now + ttl, id)
end

return perhaps_open, ticket_text, ticket_file
