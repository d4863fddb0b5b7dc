-- Takes a slot of the best worker that has a free one, or files a ticket that carries the call's bids.
--
--   ARGV[4]   id of the lease or ticket, new for each call
--   ARGV[5]   lifetime of the lease, ms
--   ARGV[6]   team
--   ARGV[7]   the call's charge, virtual tokens
--   ARGV[8]   weight of the team
--   ARGV[9]   worker to take at once if it has a free slot; empty: there is none
--   ARGV[10]  KV tokens that the call takes there
--   ARGV[11]  the next best workers to take at once, best first: "worker kv worker kv "
--   ARGV[12]  "ttl most most_of_team class within": lifetime of the ticket, ms; maximum tickets that wait, a call
--             beyond gets "full"; of one team, a call beyond gets "team full"; priority class, higher goes first; ms
--             from now within which its first token is wanted, 0: no deadline
--   ARGV[13]  the call's bids: their lines about workers (shared.lua)
-- Result: {"lease", fence, worker, boot, address} | {"queued", rank, start, position} | {"full", waiting} |
--   {"team full", waiting}
--
-- Keeps: no worker has more leases than slots and overdraft, and those beyond its slots are lent to teams that have
-- less than their share; nobody overtakes a waiting ticket that loses more by waiting, or one that was overtaken
-- MOST_PASSED times. Running it twice with one id is as running it once.
local lease_ttl, weight = tonumber(ARGV[5]), ARGV[8]
local ticket_ttl, most, most_of_team, class, within = match(ARGV[12], "^(%d+) (%d+) (%d+) (%S+) (%d+)$")
local take = {}
if worker ~= "" then take[1] = {worker = worker, kv = kv} end
for name, tokens in string.gmatch(ARGV[11], "(%S+) (%d+) ") do
  take[#take + 1] = {worker = name, kv = tonumber(tokens)}
end
most, most_of_team = tonumber(most), tonumber(most_of_team)

local waiting, known = num_waiting(), call_read(id)

if not known and waiting == 0 and not settling() then
  for _, wanted in ipairs(take) do
    local record = open_worker(wanted.worker)
    if record and kv_fits(record, wanted.kv) then
      local fence = lease_take(record, id, GATEWAY, lease_ttl, wanted.kv, nil, team, weight, share)
      local start = math.max(virtual_time(), (team_read(team)))
      virtual_time_reaches(start)
      team_add(team, start + share - team_read(team), 0, 1)
      ledger_save()
      return {"lease", fence, record.worker, record.boot, record.address}
    end
  end
end

local function queued_reply(rank, filed_start)
  return {"queued", rank, filed_start, (call("ZRANK", queue_key, id) or 0) + 1}
end

if known then
  local lease = lease_read(known)
  if lease and not lease.granted then
    return {"lease", tonumber(lease.fence), lease.worker, lease.boot, lease.address}
  end
  local _, filed_start, rank = ticket_read(lease and lease.ticket or known)
  if rank then return queued_reply(rank, filed_start) end
end

local finish, num_tickets, num_leases = team_read(team)
if waiting >= most or num_tickets >= most_of_team then
  -- Expired tickets must not make the line look full.
  local ticket_drop = tickets()
  for _, dead in ipairs(call("ZRANGEBYSCORE", tickets_key, "-inf", now)) do
    if call("ZSCORE", queue_key, dead) then ticket_drop(dead, call_read(dead)) end
  end
  waiting, finish, num_tickets, num_leases = num_waiting(), team_read(team)
  if waiting >= most or num_tickets >= most_of_team then
    ledger_save()
    if waiting >= most then return {"full", waiting} end
    return {"team full", num_tickets}
  end
end

local perhaps_open, ticket_text, ticket_file = filing()
local start = math.max(virtual_time(), finish)
finish = start + share
local rank, filed_start = format("%.17g", finish - class * CLASS), format("%.17g", start)
team_write(team, finish, num_tickets + 1, num_leases)
local filed = ticket_text(within, ARGV[13], filed_start, rank, share, weight, format("%d", now), team)
ticket_file(id, filed, rank, tonumber(ticket_ttl))
local granted = 0
if waiting > 0 then
  -- All that wait may want other workers only: then this call gets a slot at once.
  local workers = {}
  for at, wanted in ipairs(take) do workers[at] = wanted.worker end
  local open = perhaps_open(workers)
  if #open > 0 then granted = line()(open, nil, id) end
end
-- No other ticket of its team waits: the team may be owed a slot beyond a worker's own.
if granted == 0 and num_tickets == 0 then granted = overdraft()({id}, 2) end
local reply
if granted > 0 then
  local text = call_read(id)
  local lease = lease_read(text)
  if lease and lease.granted then reply = grant_claim(id, lease, text, lease_ttl) end
end
ledger_save()
return reply or queued_reply(rank, filed_start)
