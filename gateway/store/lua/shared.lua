-- The beginning of every admission script, put after the key names (made from workers/protocol/keys.py).
--
-- A call gets a slot of a worker as a lease, or waits for one as a ticket in the model's line (the queue). A grant is a
-- lease that was given to a ticket and that its gateway has not claimed yet.
--
-- Every script:
--   KEYS[1]  prefix of the model's keys, its hash tag included; all other names are built from it
--   ARGV[1]  protocol version; workers of another version get no leases
--   ARGV[2]  lifetime of a grant, ms
--   ARGV[3]  id of the gateway that calls
-- The clock is this server's.
--
-- Most of a script's time goes into calls of Redis and into making functions. So a call has one record (a field of
-- `calls`), all counts lie in one hash (the ledger) that is read once and written once, and what few runs need is made
-- by a function of its own: filing.lua, line.lua, overdraft.lua and tickets.lua are bodies of functions, and return
-- what they make. What most runs of `acquire` and `release` do stands before all that (acquire_at_once.lua,
-- release_at_once.lua).
--
-- Fields of the ledger:
--   v         virtual time
--   fence     the last fencing token
--   settling  unix ms until which nothing is granted
--   waits     there while tickets may wait
--   ""        LONG
--   t:<team>  "finish tickets leases": where in virtual time the team's last call finishes, and how many it has
--   w:<id>    "boot leases kv slots": a worker's process, its leases, their KV tokens, its slots at its latest lease
--
-- A record of `calls` is one of:
--   a lease   "L fence kv share weight worker boot gateway address", and on a second line its team. Share: what its
--             team was charged; "-": not known, as it was taken anew after Redis had lost it
--   a grant   the same with "G", and behind it the ticket, which waits again if nobody claims the grant
--   a ticket  seven lines: its deadline (unix ms; 0: none); the bid for any worker that is not named, or nothing;
--             workers that would not do, between blanks; "|worker=bid|worker=bid|"; its gateway; "start rank share
--             weight at"; its team. At: when it was filed, unix ms
-- A bid is "rate kv cost else". Rate: ms that the call loses if another one gets the slot, per ms that it would hold
-- it; negative: it is better off waiting for another worker. KV: tokens that the call is predicted to take. Cost: ms to
-- the first token on this worker. Else: ms to the first token on the best other worker, the wait for that one included.
-- What can't be read counts as not there: a gateway sends its tickets and leases again.
--
-- Fair shares are counted in virtual tokens: the tokens that a call is charged, divided by its team's weight. A team's
-- next call starts where its last one finishes, or at the virtual time if that is later. The virtual time is the latest
-- start of a call that was first in line when a slot was given away (weighted fair queueing by start and finish tags:
-- Goyal, Vin, Cheng, "Start-time Fair Queueing", 1996).
local call, match, format = redis.call, string.match, string.format
local GRANT_TTL, GATEWAY = tonumber(ARGV[2]), ARGV[3]

local WINDOW = 16      -- a free slot is offered to so many tickets at the head of the line
local WINDOWS = 4      -- if none of them wants it, it is offered to the next WINDOW; so many windows in all
local WINDOWS_OF_ALL = 16 -- the same where all workers' slots are given away, for the tickets further behind
local MOST_TOLD = 2 ^ 48 -- more slots or tokens in a worker's record count as 0
local FARTHEST, NEAR = 120000, 6000 -- expiries that lie further ahead, ms, are moved near: a clock was set back
local AT_ONCE = 1000   -- arguments of one command
-- A hash of few short values is a list to Redis, which it searches from its beginning for each field; one with a value
-- of this length is not. It lies in the hashes that are read most, in a field without a name.
local LONG = string.rep("-", 65)
local CLASS = 2 ^ 46   -- distance between two priority classes in the line, virtual tokens

local clock = call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- `ledger`, declared before: the fields read or written in this run; false: there is none.
local changed = {} -- those that were written

local function ledger_get(field)
  local value = ledger[field]
  if value == nil then
    value = call("HGET", ledger_key, field)
    ledger[field] = value
  end
  return value
end

-- Reads fields by one call; what this run has read or written before stays.
local function ledger_load(fields)
  local values = call("HMGET", ledger_key, unpack(fields))
  for at = 1, #fields do
    local field = fields[at]
    if ledger[field] == nil then ledger[field] = values[at] end
  end
end

-- Returns the workers that have leases, and reads the whole ledger.
local function workers_leased()
  local all, workers = call("HGETALL", ledger_key), {}
  for at = 1, #all, 2 do
    local field = all[at]
    if ledger[field] == nil then ledger[field] = all[at + 1] end
    if string.sub(field, 1, 2) == "w:" then workers[#workers + 1] = string.sub(field, 3) end
  end
  return workers
end

-- Sets a field, or removes it (false). Nothing is written before `ledger_save`, with which a script ends, also by an
-- error.
local function ledger_set(field, value)
  ledger[field], changed[field] = value, true
end

local function ledger_save()
  local set, gone = {}, {}
  if ledger[""] == false then ledger_set("", LONG) end
  for field in pairs(changed) do
    local value = ledger[field]
    if value then
      set[#set + 1], set[#set + 2] = field, value
    else
      gone[#gone + 1] = field
    end
  end
  for first = 1, #set, AT_ONCE do
    call("HSET", ledger_key, unpack(set, first, math.min(#set, first + AT_ONCE - 1)))
  end
  for first = 1, #gone, AT_ONCE do
    call("HDEL", ledger_key, unpack(gone, first, math.min(#gone, first + AT_ONCE - 1)))
  end
end

-- Returns where in virtual time the team's last call finishes, its tickets and its leases.
local function team_read(team)
  local finish, tickets, leases = match(ledger_get("t:" .. team) or "", "^(%S+) (%d+) (%d+)$")
  return tonumber(finish) or 0, tonumber(tickets) or 0, tonumber(leases) or 0
end

local function team_write(team, finish, tickets, leases)
  -- A number may be lost, as in a Redis that evicts keys; what it counted ends all the same.
  tickets, leases = math.max(0, tickets), math.max(0, leases)
  ledger_set("t:" .. team, format("%.17g %d %d", finish, tickets, leases))
end

-- Adds to what a team has.
local function team_add(team, share, tickets, leases)
  local finish, num_tickets, num_leases = team_read(team)
  team_write(team, finish + share, num_tickets + tickets, num_leases + leases)
end

local function virtual_time()
  return tonumber(ledger_get("v")) or 0
end

local function virtual_time_reaches(start)
  if start > virtual_time() then ledger_set("v", format("%.17g", start)) end
end

-- Returns how many tickets wait, and has it noted whether any does.
local function num_waiting()
  local number = call("ZCARD", queue_key)
  if (number > 0) ~= (ledger_get("waits") ~= false) then ledger_set("waits", number > 0 and "1") end
  return number
end

-- Puts a ticket in the line.
local function ticket_queue(id, rank)
  call("ZADD", queue_key, rank, id)
  ledger_set("waits", "1")
end

local function settling()
  return (tonumber(ledger_get("settling")) or 0) > now
end

-- Settles for `for_ms`: nothing is granted, and new calls get tickets, until every gateway had time to renew its
-- leases. For when Redis has lost its data, or was away: calls run on slots that look free. Returns whether settling
-- begins now.
local function settle(for_ms)
  if settling() then return false end
  ledger_set("settling", format("%d", now + for_ms))
  return true
end

-- Returns a call's record; nil: there is none.
local function call_read(id)
  return call("HGET", calls_key, id) or nil
end

-- Returns a lease or a grant from its record; nil: it is none.
local function lease_read(text)
  local kind, fence, kv, share, weight, worker, boot, gateway, address, team, ticket =
      match(text or "", "^([LG]) (%d+) (%d+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S*)\n([^\n]*)\n?(.*)$")
  if not kind then return nil end
  return {
    granted = kind == "G", fence = fence, kv = tonumber(kv), share = tonumber(share), weight = weight, worker = worker,
    boot = boot, gateway = gateway, address = address, team = team, ticket = ticket,
  }
end

-- Returns a ticket's gateway, start, rank, share, weight, time of filing and team from its record; nil: it is none.
local function ticket_read(text)
  local _, last = string.find(text or "", "|\n", 1, true)
  if not last or not match(text, "^%d+\n") then return nil end
  return match(text, "^([^\n]*)\n(%S+) (%S+) (%S+) (%S+) (%S+)\n([^\n]*)$", last + 1)
end

-- Reads a worker's field of the ledger.
local function leased_read(text)
  local boot, leases, kv, slots = match(text or "", "^(%S+) (%d+) (%d+) (%d+)$")
  return boot, tonumber(leases), tonumber(kv), tonumber(slots)
end

local function leased_write(worker, boot, leases, kv, slots)
  ledger_set("w:" .. worker, leases > 0 and format("%s %d %d %d", boot, leases, math.max(0, kv), slots))
end

-- Returns a number of a worker's record; 0 where it is too large: a worker's login can write any.
local function told(text)
  local number = tonumber(text)
  return number <= MOST_TOLD and number or 0
end

-- Returns what a worker tells of itself (`heartbeat.placing_of`): boot, slots, KV cells, those in use, whether it
-- drains, overdraft and address. Nil: it is gone, or speaks another protocol.
local function worker_told(worker)
  local text = call("HGET", worker_key(worker), "placing")
  local boot, protocol, slots, kv, kv_used, draining, overdraft, address =
      match(text or "", "^(%S+) (%d+) (%d+) (%d+) (%d+) ([01]) (%d+) (%S*)$")
  if protocol ~= ARGV[1] then return nil end
  return boot, told(slots), told(kv), told(kv_used), draining == "1", told(overdraft), address
end

-- Returns a worker's field of the ledger, read; nil: it has no leases. Where the field is gone though the worker has
-- leases, as in a Redis that evicts keys, it is made anew from them.
local function leased_of(worker)
  local boot, leases, kv, slots = leased_read(ledger_get("w:" .. worker))
  if boot then return boot, leases, kv, slots end
  local ids = call("ZRANGE", worker_leases_key(worker), 0, -1)
  if #ids == 0 then return nil end
  boot, kv = "-", 0
  for _, id in ipairs(ids) do
    local lease = lease_read(call_read(id))
    if lease then boot, kv = lease.boot, kv + lease.kv end
  end
  slots = select(2, worker_told(worker)) or 0
  leased_write(worker, boot, #ids, kv, slots)
  return boot, #ids, kv, slots
end

-- Ends a lease. `lease`: its record, read; nil: it has none, or another one that stays. If it was a grant that nobody
-- claimed, its ticket goes back to its old place. Returns whether the worker still has no free slot, as it had leases
-- beyond them.
local function lease_drop(worker, id, lease)
  local full = false
  local boot, leases, kv, slots = leased_of(worker)
  if call("ZREM", worker_leases_key(worker), id) == 1 and boot then
    leased_write(worker, boot, leases - 1, kv - (lease and lease.kv or 0), slots)
    if lease then team_add(lease.team, 0, 0, -1) end
    full = leases > slots
  end
  if lease and lease.granted then
    local _, _, rank = ticket_read(lease.ticket)
    if tonumber(rank) then
      call("HSET", calls_key, id, lease.ticket)
      ticket_queue(id, rank)
      return full
    end
  end
  if lease then call("HDEL", calls_key, id) end
  return full
end

local function leases_drop_all(worker)
  for _, id in ipairs(call("ZRANGE", worker_leases_key(worker), 0, -1)) do
    lease_drop(worker, id, lease_read(call_read(id)))
  end
  ledger_set("w:" .. worker, false)
end

-- Returns a live worker's record with its leases, or nil. Leases of the worker's earlier process are void and end here.
local function worker_record(worker)
  local boot, slots, cells, kv_used, draining, overdraft, address = worker_told(worker)
  if not boot then return nil end
  local leased_boot, leases, kv_leased = leased_of(worker)
  if leased_boot ~= boot then
    if leased_boot then leases_drop_all(worker) end
    leases, kv_leased = 0, 0
  end
  return {
    worker = worker, boot = boot, address = address, slots = slots, draining = draining, leases = leases,
    kv_leased = kv_leased, overdraft = overdraft, kv = cells,
    -- The KV tokens of leases are predicted, and the worker's own report is late: the larger number counts.
    -- An encoder has no KV cells, and needs none.
    kv_free = cells == 0 and math.huge or cells - math.max(kv_leased, kv_used),
  }
end

-- Returns a worker's record if a slot is free there; nil: none is, or it drains, is gone, or speaks another protocol.
-- An expired lease counts until a sweep has found it.
local function open_worker(worker)
  local record = worker_record(worker)
  if record and not record.draining and record.leases < record.slots then return record end
  return nil
end

-- Whether a call's KV tokens fit. A worker without leases takes any call, and itself refuses a prompt that never fits.
local function kv_fits(record, kv)
  return record.leases == 0 or kv <= record.kv_free
end

-- Takes a slot that the caller found free, or a place beyond the slots (overdraft.lua). `fence` nil: the lease gets a
-- new fencing token. `ticket`: the record of the ticket that is granted the lease; nil: it is claimed. The caller
-- counts the lease for its team. Returns the fencing token.
local function lease_take(record, id, gateway, ttl, kv, fence, team, weight, share, ticket)
  if not fence then
    fence = format("%d", (tonumber(ledger_get("fence")) or 0) + 1)
    ledger_set("fence", fence)
  end
  local text = format("%s %s %d %s %s %s %s %s %s\n%s", ticket and "G" or "L", fence, kv, share, weight, record.worker,
    record.boot, gateway, record.address, team)
  call("HSET", calls_key, id, ticket and text .. "\n" .. ticket or text)
  call("ZADD", worker_leases_key(record.worker), now + ttl, id)
  record.leases, record.kv_leased, record.kv_free = record.leases + 1, record.kv_leased + kv, record.kv_free - kv
  leased_write(record.worker, record.boot, record.leases, record.kv_leased, record.slots)
  return tonumber(fence)
end

-- Makes a claimed lease of a grant. Returns the answer to its gateway, with how often the ticket was overtaken.
local function grant_claim(id, lease, text, ttl)
  local passed = 0
  call("ZADD", worker_leases_key(lease.worker), now + ttl, id)
  if lease.granted then
    call("HSET", calls_key, id, "L" .. match(text, "^G([^\n]*\n[^\n]*)"))
    call("ZREM", tickets_key, id)
    passed = tonumber(call("HGET", passed_key, id)) or 0
    if passed > 0 then call("HDEL", passed_key, id) end
    team_add(lease.team, 0, -1, 0)
  end
  return {"lease", tonumber(lease.fence), lease.worker, lease.boot, lease.address, passed}
end
