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
-- Fair shares are counted in virtual tokens: the tokens that a call is charged, divided by its team's weight. A team's
-- next call starts where its last one finishes, or at the virtual time if that is later. The virtual time is the latest
-- start of a call that was first in line when a slot was given away (weighted fair queueing by start and finish tags:
-- Goyal, Vin, Cheng, "Start-time Fair Queueing", 1996).
local PROTOCOL, GRANT_TTL, GATEWAY = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]

local WINDOW = 16      -- a free slot is offered to so many tickets at the head of the line
local WINDOWS = 4      -- if none of them wants it, it is offered to the next WINDOW; so many windows in all
local WINDOWS_OF_ALL = 16 -- the same where all workers' slots are given away, for the tickets further behind
local MOST_TOLD = 2 ^ 48 -- more slots or tokens in a worker's record count as 0
local WORKERS = 2048   -- workers of a model looked at in one run: another program may have written more names
local IN_VAIN = 4      -- after so many workers that no ticket wanted, it is checked first whether one can
local MOST_PASSED = 8  -- a ticket that was overtaken so often is not overtaken again
local CLASS = 2 ^ 46   -- distance between two priority classes in the line, virtual tokens
local MET = 1e9        -- rate of a bid whose deadline can be met on this worker only: above all other rates

local clock = redis.call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Returns a number with all its digits: by itself Lua would write fourteen.
local function exact(number) return string.format("%.17g", number) end

-- Returns the virtual time, where in it the team's last call finishes, and how many tickets the team has.
local function team_read(team)
  local fields = redis.call("HMGET", fair_key, "v", "f:" .. team, "n:" .. team)
  return tonumber(fields[1]) or 0, tonumber(fields[2]) or 0, tonumber(fields[3]) or 0
end

local function virtual_time_reaches(start)
  if start > (tonumber(redis.call("HGET", fair_key, "v")) or 0) then redis.call("HSET", fair_key, "v", exact(start)) end
end

-- Charges a team so many virtual tokens more (negative: less), as its call took others than were predicted.
local function charge_rest(team, share)
  if team and share ~= 0 then redis.call("HINCRBYFLOAT", fair_key, "f:" .. team, exact(share)) end
end

local function ticket_forget(id, team)
  redis.call("ZREM", tickets_key, id)
  redis.call("DEL", ticket_key(id), ticket_bids_key(id))
  if not team then return end
  local none_left = redis.call("HINCRBY", fair_key, "n:" .. team, -1) <= 0
  redis.call("HDEL", fair_key, "p:" .. id, none_left and "n:" .. team or "p:" .. id)
end

-- Removes a ticket that will not be served, and gives its team the charge back.
local function ticket_drop(id)
  local ticket = redis.call("HMGET", ticket_key(id), "team", "share")
  redis.call("ZREM", queue_key, id)
  ticket_forget(id, ticket[1] or nil)
  charge_rest(ticket[1], -(tonumber(ticket[2]) or 0))
end

-- Reads a worker's field of `leased`, "boot leases kv slots". The slots are those that it had at its latest lease.
local function leased_read(text)
  local boot, leases, kv, slots = string.match(text, "^(%S+) (%d+) (%d+) (%d+)$")
  return boot, tonumber(leases), tonumber(kv), tonumber(slots)
end

local function leased_write(worker, boot, leases, kv, slots)
  redis.call("HSET", leased_key, worker, string.format("%s %d %d %d", boot, leases, math.max(0, kv), slots))
end

-- Returns a number of a worker's record; 0 where it is no number from 0 to MOST_TOLD: any program may have written it.
local function told(text)
  local number = tonumber(text) or 0
  return number >= 0 and number <= MOST_TOLD and math.floor(number) or 0
end

-- Returns a worker's field of `leased`; nil: the worker has no leases. Where the field is gone though it has leases, as
-- in a Redis that evicts keys, it is made anew from them.
local function leased_text(worker)
  local text = redis.call("HGET", leased_key, worker)
  if text then return text end
  local ids = redis.call("ZRANGE", worker_leases_key(worker), 0, -1)
  if #ids == 0 then return nil end
  local boot, kv = "-", 0
  for _, id in ipairs(ids) do
    local lease = redis.call("HMGET", lease_key(id), "boot", "kv")
    boot, kv = lease[1] or boot, kv + (tonumber(lease[2]) or 0)
  end
  leased_write(worker, boot, #ids, kv, told(redis.call("HGET", worker_key(worker), "slots")))
  return redis.call("HGET", leased_key, worker)
end

-- Ends a lease. `lease`: its KV tokens, team and charge; nil: they are read. If it was a grant that nobody claimed, its
-- ticket goes back to its old place. Returns whether the worker still has no free slot, as it had leases beyond them.
local function lease_drop(worker, id, lease)
  lease = lease or redis.call("HMGET", lease_key(id), "kv", "team", "share")
  local full, text = false, leased_text(worker)
  redis.call("DEL", lease_key(id))
  if redis.call("ZREM", worker_leases_key(worker), id) == 1 then
    local boot, leases, kv, slots = leased_read(text)
    if leases == 1 then
      redis.call("HDEL", leased_key, worker)
    else
      leased_write(worker, boot, leases - 1, kv - (tonumber(lease[1]) or 0), slots)
    end
    -- The number may be lost, as in a Redis that evicts keys; the leases that it counted then end all the same.
    local held = "h:" .. (lease[2] or "")
    if lease[2] and redis.call("HINCRBY", fair_key, held, -1) < 1 then redis.call("HDEL", fair_key, held) end
    full = leases > slots
  end
  local rank = not lease[3] and redis.call("HGET", ticket_key(id), "rank")
  if rank then redis.call("ZADD", queue_key, rank, id) end
  return full
end

local function leases_drop_all(worker)
  for _, id in ipairs(redis.call("ZRANGE", worker_leases_key(worker), 0, -1)) do lease_drop(worker, id) end
  redis.call("HDEL", leased_key, worker)
end

-- Returns a live worker's record with its leases, or nil. Leases of the worker's earlier process are void and end here.
local function worker_record(worker)
  local fields = redis.call("HMGET", worker_key(worker), "boot", "address", "protocol", "slots", "kv", "kv_used", "draining",
    "overdraft")
  if not fields[1] or not string.find(fields[1], "^%S+$") or tonumber(fields[3]) ~= PROTOCOL then return nil end
  local record = {
    worker = worker, boot = fields[1], address = fields[2] or "", slots = told(fields[4]),
    draining = fields[7] == "1", leases = 0, kv_leased = 0, overdraft = told(fields[8]),
  }
  local text = leased_text(worker)
  if text then
    local boot, leases, kv = leased_read(text)
    if boot == record.boot then
      record.leases, record.kv_leased = leases, kv
    else
      leases_drop_all(worker)
    end
  end
  -- The KV tokens of leases are predicted, and the worker's own report is late: the larger number counts.
  record.kv = told(fields[5])
  record.kv_free = record.kv - math.max(record.kv_leased, told(fields[6]))
  if record.kv == 0 then record.kv_free = math.huge end -- an encoder: it has no KV cells, and needs none
  return record
end

-- Returns a worker's record if a slot is free there; nil: none is, or it drains, is gone, or speaks another protocol.
-- An expired lease counts until a sweep has found it.
local function open_worker(worker)
  local record = worker_record(worker)
  if record and not record.draining and record.leases < record.slots then return record end
  return nil
end

-- Returns the workers that are not known to have all their slots leased, by one read for all. A worker that has
-- restarted with more slots may be missed, until its old leases are swept.
local function perhaps_open(workers)
  local open = {}
  for at, text in ipairs(#workers > 0 and redis.call("HMGET", leased_key, unpack(workers)) or {}) do
    local _, leases, _, slots = leased_read(text or "- 0 0 1")
    if leases < slots then open[#open + 1] = workers[at] end
  end
  return open
end

-- Whether a call's KV tokens fit. A worker without leases takes any call, and itself refuses a prompt that never fits.
local function kv_fits(record, kv)
  return record.leases == 0 or kv <= record.kv_free
end

-- Takes a slot that the caller found free, or a place beyond the slots (shared_overdraft.lua). `fence` nil: the lease
-- gets a new fencing token. `...`: further fields of the lease. Returns the fencing token.
local function lease_take(record, id, gateway, ttl, kv, fence, team, weight, ...)
  fence = fence or redis.call("INCR", fence_key)
  redis.call("HSET", lease_key(id), "worker", record.worker, "boot", record.boot, "address", record.address,
    "gateway", gateway, "fence", fence, "kv", kv, "team", team, "weight", weight, ...)
  redis.call("HINCRBY", fair_key, "h:" .. team, 1)
  redis.call("ZADD", worker_leases_key(record.worker), now + ttl, id)
  record.leases, record.kv_leased, record.kv_free = record.leases + 1, record.kv_leased + kv, record.kv_free - kv
  leased_write(record.worker, record.boot, record.leases, record.kv_leased, record.slots)
  return fence
end

-- Returns the answer to a gateway about a lease that it holds now.
local function lease_reply(id)
  local lease = redis.call("HMGET", lease_key(id), "fence", "worker", "boot", "address")
  return {"lease", tonumber(lease[1]), lease[2], lease[3], lease[4]}
end

-- Settles for `for_ms`: nothing is granted, and new calls get tickets, until every gateway had time to renew its
-- leases. For when Redis has lost its data, or was away: calls run on slots that look free. Returns whether settling
-- begins now.
local function settle(for_ms)
  return redis.call("SET", settling_key, "1", "PX", for_ms, "NX") ~= false
end

local function settling()
  return redis.call("EXISTS", settling_key) == 1
end

-- A ticket's bids are one text of six lines: its deadline (unix ms; 0: none); the bid for any worker that is not named,
-- or nothing; workers that would not do, between blanks; "|worker=bid|worker=bid|"; its team; its gateway.
--
-- A bid is "rate kv cost else". Rate: ms that the call loses if another one gets the slot, per ms that it would hold
-- it; negative: it is better off waiting for another worker. KV: tokens that the call is predicted to take. Cost: ms to
-- the first token on this worker. Else: ms to the first token on the best other worker, the wait for that one included.
local function team_and_gateway(text)
  return string.match(text, "\n([^\n]*)\n([^\n]*)$")
end

-- Grants a waiting ticket a lease. `first`: the ticket at the head of the line. A ticket whose record is gone, as in a
-- Redis that evicts keys, leaves the line until its gateway re-reads it.
local function ticket_grant(record, id, kv, first)
  local filed = redis.call("HMGET", ticket_key(id), "channel", "start", "gateway", "team", "weight")
  if not filed[2] then
    redis.call("ZREM", queue_key, id)
    return
  end
  local start = tonumber(filed[2])
  -- No later than the first ticket's start: after a grant far behind, a team that comes back would stand behind that.
  if first ~= id then start = math.min(start, tonumber(redis.call("HGET", ticket_key(first), "start")) or start) end
  virtual_time_reaches(start)
  redis.call("ZREM", queue_key, id)
  lease_take(record, id, filed[3], GRANT_TTL, kv, nil, filed[4], filed[5] or 1)
  redis.call("PUBLISH", filed[1], id)
end

-- Gives the free slots of these workers to waiting tickets; a ticket that no slot suits keeps its place. `missed`:
-- gateways whose tickets get nothing this time. `newcomer`: a ticket that is asked wherever in the line it stands.
-- `windows`: how many windows of the line to ask. Returns how many grants were made.
--
-- A ticket whose gateway is gone can get a grant until a sweep has found it; nobody claims that, so it goes to another.
local function grant_from_line(workers, missed, newcomer, windows)
  local line = {} -- number of a window -> its tickets, read once until the line changes
  local wants     -- worker ("": any) -> KV tokens of the smallest call that wants it; nil: not read yet

  local function read(ids)
    if #ids == 0 then return {ids = ids} end
    local names, fields = {}, {}
    for at, id in ipairs(ids) do names[at], fields[at] = ticket_bids_key(id), "p:" .. id end
    return {ids = ids, texts = redis.call("MGET", unpack(names)), passed = redis.call("HMGET", fair_key, unpack(fields))}
  end

  local function window(number)
    if not line[number] then
      line[number] = read(redis.call("ZRANGE", queue_key, number * WINDOW, (number + 1) * WINDOW - 1))
    end
    return line[number]
  end

  -- Returns rate, KV tokens, cost and else of a bid for a worker; nil: the worker would not do.
  local function bid_for(text, name, blank)
    local _, last = string.find(text, name, 1, true)
    if last then return string.match(text, "^(%S+) (%d+) (%S+) ([^|]+)", last + 1) end
    local elsewhere, left_out = string.match(text, "\n([^\n]*)\n([^\n]*)\n")
    if string.find(left_out, blank, 1, true) then return nil end
    return string.match(elsewhere, "^(%S+) (%d+) (%S+) (%S+)")
  end

  -- Whether a ticket goes first because it can meet its deadline on this worker only. It does not pass `first`, the
  -- first in line that wants the slot, if that is another team's with a deadline still ahead: a team that asks for more
  -- than its share must not make other teams miss their deadlines.
  local function is_urgent(text, deadline, cost, other, first)
    if now + cost > deadline or now + other <= deadline then return false end
    return not first or tonumber(string.match(first, "^%d+")) <= now or team_and_gateway(first) == team_and_gateway(text)
  end

  -- Returns the ticket of a window that gets a slot of an open worker; nil: none does. If the second value is true,
  -- none behind them may get it either. Adds those that want it to `before`, in line, with their next number of
  -- overtakings.
  local function choose(record, tickets, before)
    local name, blank = "|" .. record.worker .. "=", " " .. record.worker .. " "
    local best, most = nil, 0
    for at, id in ipairs(tickets.ids) do
      local text = tickets.texts[at]
      local rate, kv, cost, other
      if text and not (missed and missed[select(2, team_and_gateway(text))]) then
        rate, kv, cost, other = bid_for(text, name, blank)
        rate, kv = tonumber(rate), tonumber(kv)
      end
      if rate and rate >= 0 then
        local fits, passed = kv_fits(record, kv), tonumber(tickets.passed[at]) or 0
        local due = passed >= MOST_PASSED
        if due and fits then return {id = id, kv = kv, num_before = 0}, true end
        -- Due, but it does not fit yet: on the worker that it names first, no other takes the room it waits for.
        if due and string.find(text, "\n" .. name, 1, true) then return nil, true end
        -- Tickets that can meet their deadline only here come first, and among these the earliest deadline.
        local deadline = string.sub(text, 1, 2) ~= "0\n" and tonumber(string.match(text, "^%d+"))
        if deadline and is_urgent(text, deadline, tonumber(cost), tonumber(other), before.first) then
          rate = MET + 1e9 / (deadline - now + 1)
        end
        if fits and (not best or rate > most) then
          best, most = {id = id, kv = kv, num_before = #before / 2}, rate
        end
        before.first = before.first or text
        before[#before + 1], before[#before + 2] = "p:" .. id, passed + 1
      end
    end
    return best
  end

  local function choose_from_line(record)
    local before, behind = {}, newcomer
    for number = 0, windows - 1 do
      local tickets = window(number)
      local ticket, over = choose(record, tickets, before)
      if ticket or over then return ticket, before end
      for _, id in ipairs(tickets.ids) do
        if id == behind then behind = nil end
      end
      if #tickets.ids == 0 then return nil end
    end
    -- The newcomer stands behind all that were asked.
    if behind then return choose(record, read({behind}), before), before end
  end

  -- Whether any ticket in the windows can want a worker: quicker than asking each ticket, where many workers are open.
  local function may_be_wanted(record)
    if not wants then
      wants = {}
      local function note(worker, rate, kv)
        if tonumber(rate) >= 0 then wants[worker] = math.min(wants[worker] or math.huge, tonumber(kv)) end
      end
      for number = 0, windows - 1 do
        for at in ipairs(window(number).ids) do
          local text = window(number).texts[at]
          if text then
            local rate, kv = string.match(text, "^[^\n]*\n(%S+) (%d+)")
            if rate then note("", rate, kv) end
            for worker, named_rate, named_kv in string.gmatch(text, "([^|\n]+)=(%S+) (%d+)[^|\n]*|") do
              note(worker, named_rate, named_kv)
            end
          end
        end
      end
    end
    return kv_fits(record, math.min(wants[record.worker] or math.huge, wants[""] or math.huge))
        and (wants[record.worker] or wants[""]) ~= nil
  end

  local granted, in_vain = 0, 0
  for _, worker in ipairs(workers) do
    local record = open_worker(worker)
    while record and record.leases < record.slots and (in_vain < IN_VAIN or may_be_wanted(record)) do
      local ticket, before = choose_from_line(record)
      if not ticket then
        in_vain = in_vain + 1
        break
      end
      ticket_grant(record, ticket.id, ticket.kv, line[0].ids[1])
      -- Overtaken are those that wanted the slot too and stood before the ticket that got it.
      if ticket.num_before > 0 then redis.call("HSET", fair_key, unpack(before, 1, 2 * ticket.num_before)) end
      if ticket.id == newcomer then newcomer = nil end
      granted, line, wants = granted + 1, {}, nil
    end
  end
  return granted
end

local function grant(workers, missed, newcomer, windows)
  if #workers == 0 or redis.call("ZCARD", queue_key) == 0 or settling() then return 0 end
  return grant_from_line(workers, missed, newcomer, windows or WINDOWS)
end

-- Returns the names of workers to look at: all, or WORKERS at random where another program has written more.
local function workers_some()
  return redis.call("SRANDMEMBER", workers_key, WORKERS)
end

local function grant_all(missed)
  return grant(workers_some(), missed, nil, WINDOWS_OF_ALL)
end

-- Writes a ticket's bids. `within`: ms to its deadline; 0: none. `text`: the lines about workers, made by its gateway.
local function bids_write(id, within, text, team)
  local deadline = tonumber(within) > 0 and now + tonumber(within) or 0
  local line_of_team = string.gsub(team, "[\n|]", " ")
  redis.call("SET", ticket_bids_key(id), string.format("%d\n%s\n%s\n%s", deadline, text, line_of_team, GATEWAY))
end

-- Puts a ticket in the line at its rank. The caller has counted it for its team before.
local function ticket_file(id, channel, ttl, team, weight, share, start, rank)
  redis.call("HSET", ticket_key(id), "gateway", GATEWAY, "channel", channel, "team", team, "weight", weight,
    "share", share, "start", start, "rank", rank, "at", exact(now))
  redis.call("ZADD", queue_key, rank, id)
  redis.call("ZADD", tickets_key, now + ttl, id)
end

-- Makes a claimed lease of a grant. Returns how often its ticket was overtaken.
local function grant_claim(worker, id, ttl)
  redis.call("ZADD", worker_leases_key(worker), now + ttl, id)
  local ticket = redis.call("HMGET", ticket_key(id), "team", "share")
  if not ticket[1] then return 0 end
  local passed = tonumber(redis.call("HGET", fair_key, "p:" .. id)) or 0
  redis.call("HSET", lease_key(id), "share", ticket[2])
  ticket_forget(id, ticket[1])
  return passed
end
