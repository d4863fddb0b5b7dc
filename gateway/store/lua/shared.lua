-- What the admission scripts share. Prepended to each of them, below the key names (made from workers/protocol/keys.py).
--
-- Every script:
--   KEYS[1]  prefix of the model's keys, its hash tag included; all other names are built from it
--   ARGV[1]  protocol version; workers of another one are never leased
--   ARGV[2]  lifetime of a grant, ms
--   ARGV[3]  id of the gateway that calls
-- The clock is this server's.
--
-- Fair shares are kept in virtual tokens: a call's charge by its team's weight. A team's next call starts where its last
-- one finishes, or at the virtual time if that is later; the virtual time is the latest start of a call that got a slot
-- (weighted fair queueing by start and finish tags: Goyal, Vin, Cheng, "Start-time Fair Queueing", 1996).
local PROTOCOL, GRANT_TTL, GATEWAY = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]

local WINDOW = 16      -- tickets, from the head of the line, that a free slot goes to one of
local WINDOWS = 4      -- where none of them wants it, the next ones are asked, up to so many times
local MOST_PASSED = 16 -- after being overtaken so often a ticket is not overtaken again
local CLASS = 2 ^ 46   -- distance between two priority classes in the line, virtual tokens
local MET = 1e9        -- loss of a deadline

local clock = redis.call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- Lua would write fourteen digits.
local function exact(number) return string.format("%.17g", number) end

local function virtual_time() return tonumber(redis.call("HGET", fair_key, "v")) or 0 end

local function virtual_time_reaches(start)
  if start > virtual_time() then redis.call("HSET", fair_key, "v", exact(start)) end
end

-- Charges a team for a call -> where the call starts and finishes.
local function charge(team, share)
  local tags = redis.call("HMGET", fair_key, "v", "f:" .. team)
  local start = math.max(tonumber(tags[1]) or 0, tonumber(tags[2]) or 0)
  redis.call("HSET", fair_key, "f:" .. team, exact(start + share))
  return start, start + share
end

-- What a call took more (or less) than it was charged for.
local function charge_rest(team, share)
  if team and share ~= 0 then redis.call("HINCRBYFLOAT", fair_key, "f:" .. team, exact(share)) end
end

local function ticket_forget(id, team)
  redis.call("ZREM", tickets_key, id)
  redis.call("DEL", ticket_key(id))
  if team and redis.call("HINCRBY", fair_key, "n:" .. team, -1) <= 0 then redis.call("HDEL", fair_key, "n:" .. team) end
end

-- A ticket that will never be served.
local function ticket_drop(id)
  local ticket = redis.call("HMGET", ticket_key(id), "team", "share")
  redis.call("ZREM", queue_key, id)
  ticket_forget(id, ticket[1])
  charge_rest(ticket[1], -(tonumber(ticket[2]) or 0))
end

-- Frees a slot. If the lease was a grant that nobody claimed, its ticket goes back to its old place.
local function lease_drop(worker, id)
  local kv = tonumber(redis.call("HGET", lease_key(id), "kv")) or 0
  redis.call("ZREM", worker_leases_key(worker), id)
  redis.call("DEL", lease_key(id))
  if kv > 0 and redis.call("HINCRBY", leased_kv_key, worker, -kv) <= 0 then
    redis.call("HDEL", leased_kv_key, worker)
  end
  local rank = redis.call("HGET", ticket_key(id), "rank")
  if rank then redis.call("ZADD", queue_key, rank, id) end
end

local function leases_drop_all(worker)
  for _, id in ipairs(redis.call("ZRANGE", worker_leases_key(worker), 0, -1)) do lease_drop(worker, id) end
  redis.call("HDEL", leased_key, worker)
end

-- A live worker's record, or nil. What an earlier process of that worker held is void and freed here.
local function worker_record(worker)
  local fields = redis.call("HMGET", worker_key(worker), "boot", "address", "protocol", "slots", "kv", "kv_used", "draining")
  if not fields[1] or tonumber(fields[3]) ~= PROTOCOL then return nil end
  local boot = redis.call("HGET", leased_key, worker)
  if boot and boot ~= fields[1] then leases_drop_all(worker) end
  return {
    boot = fields[1], address = fields[2], slots = tonumber(fields[4]) or 0, kv = tonumber(fields[5]) or 0,
    kv_used = tonumber(fields[6]) or 0, draining = fields[7] == "1",
  }
end

local function leases_count(worker)
  return redis.call("ZCOUNT", worker_leases_key(worker), "(" .. string.format("%d", now), "+inf")
end

-- A worker as grants see it: its record, free slots and free KV tokens; nil where it has no slot free, drains,
-- is gone, or speaks another protocol.
local function open_worker(worker)
  local record = worker_record(worker)
  if not record or record.draining then return nil end
  local leases = leases_count(worker)
  if leases >= record.slots then return nil end
  record.worker, record.leases = worker, leases
  -- What leases reckon with is a prediction, what the worker reports is late: the larger one holds.
  local taken = math.max(tonumber(redis.call("HGET", leased_kv_key, worker)) or 0, record.kv_used)
  record.kv_free = record.kv - taken
  return record
end

-- An empty worker takes any call: whether its prompt fits at all is the worker's to say.
local function kv_fits(record, kv)
  return record.leases == 0 or kv <= record.kv_free
end

-- Takes a slot that the caller found free. Returns the lease's fencing token.
local function lease_take(record, id, gateway, ttl, kv, fence)
  fence = fence or redis.call("INCR", fence_key)
  redis.call("HSET", lease_key(id), "worker", record.worker, "boot", record.boot, "address", record.address,
    "gateway", gateway, "fence", fence, "kv", kv)
  redis.call("ZADD", worker_leases_key(record.worker), now + ttl, id)
  redis.call("HSET", leased_key, record.worker, record.boot)
  if kv > 0 then redis.call("HINCRBY", leased_kv_key, record.worker, kv) end
  record.leases, record.kv_free = record.leases + 1, record.kv_free - kv
  return fence
end

-- What a gateway is told of a lease that it holds now.
local function lease_reply(id)
  local lease = redis.call("HMGET", lease_key(id), "fence", "worker", "boot", "address")
  return {"lease", tonumber(lease[1]), lease[2], lease[3], lease[4]}
end

-- Redis has lost its data: calls run on slots that look free. Until every gateway has had time to renew its leases,
-- nothing is granted; those who come get tickets.
local function settle(for_ms)
  redis.call("SET", settling_key, "1", "PX", for_ms, "NX")
end

local function settling()
  return redis.call("EXISTS", settling_key) == 1
end

-- A bid is "cost else kv": ms to the first token on this worker; ms to it on the best other one, the wait for that one
-- included; KV tokens to reckon with.
local function bid_read(text)
  local cost, other, kv = string.match(text, "^(%S+) (%S+) (%S+)$")
  return tonumber(cost), tonumber(other), tonumber(kv)
end

-- A waiting ticket as a slot of `worker` sees it; nil: it is dead, and dropped.
local function ticket_read(id, worker)
  local fields = redis.call("HMGET", ticket_key(id), "until", "gateway", "channel", "start", "passed", "deadline", "hold",
    "b:" .. worker, "elsewhere", "not")
  if not fields[1] or tonumber(fields[1]) <= now then
    ticket_drop(id)
    return nil
  end
  local ticket = {id = id, gateway = fields[2], channel = fields[3], start = tonumber(fields[4]),
    passed = tonumber(fields[5]) or 0, deadline = tonumber(fields[6]) or 0, hold = tonumber(fields[7]) or 0}
  local text = fields[8]
  -- The list of those that would not do is between blanks.
  if not text and fields[9] ~= "" and not string.find(fields[10] or "", " " .. worker .. " ", 1, true) then
    text = fields[9]
  end
  if text and text ~= "" then ticket.cost, ticket.other, ticket.kv = bid_read(text) end
  return ticket
end

-- What a ticket loses if another one gets the slot, per ms that it would keep the slot's worker busy; negative: it is
-- better off waiting for another worker. Deadlines that can be met only here come first, the earliest of them before all.
local function loss(ticket)
  if ticket.deadline > 0 and now + ticket.cost <= ticket.deadline and now + ticket.other > ticket.deadline then
    return MET + 1e9 / (ticket.deadline - now + 1)
  end
  return (ticket.other - ticket.cost) / (ticket.cost + ticket.hold + 1)
end

-- The ticket that a slot of an open worker goes to, and those that it overtakes; nil where nobody wants it.
-- `passed`: gateways whose tickets keep their place this once. `newcomer`: a ticket that may stand behind the window.
local function choose(record, window, passed, newcomer)
  local best, best_loss, overtaken = nil, 0, {}
  local function consider(id)
    local ticket = ticket_read(id, record.worker)
    if not ticket or not ticket.cost or (passed and passed[ticket.gateway]) then return false end
    local lost = loss(ticket)
    if lost < 0 then return false end
    local fits = kv_fits(record, ticket.kv)
    if ticket.passed >= MOST_PASSED then
      -- Its turn: if it does not fit yet, nobody else takes the room that it waits for.
      if not best or not best.due then
        if fits then ticket.due, best = true, ticket else best = {none = true, due = true} end
      end
      return true
    end
    overtaken[#overtaken + 1] = ticket
    if fits and (not best or lost > best_loss) then best, best_loss, ticket.at = ticket, lost, #overtaken end
    return false
  end
  local met = false
  for _, id in ipairs(window) do
    met = met or id == newcomer
    if consider(id) then break end
  end
  if newcomer and not met and not best then consider(newcomer) end
  if not best or best.none then return nil end
  local behind = {}
  for at = 1, best.due and 0 or best.at - 1 do behind[at] = overtaken[at].id end
  return best, behind
end

local function choose_from_line(record, passed, newcomer)
  for number = 0, WINDOWS - 1 do
    local window = redis.call("ZRANGE", queue_key, number * WINDOW, (number + 1) * WINDOW - 1)
    local last = number == WINDOWS - 1 or #window < WINDOW
    local ticket, overtaken = choose(record, window, passed, last and newcomer)
    if ticket or last then return ticket, overtaken end
  end
end

-- Hands the free slots of these workers to waiting tickets. A ticket that none of them suits keeps its place. Returns how
-- many grants were made.
local function grant(workers, passed, newcomer)
  if redis.call("ZCARD", queue_key) == 0 or settling() then return 0 end
  local granted = 0
  for _, worker in ipairs(workers) do
    local record = open_worker(worker)
    while record and record.leases < record.slots do
      local ticket, overtaken = choose_from_line(record, passed, newcomer)
      if not ticket then break end
      redis.call("ZREM", queue_key, ticket.id)
      lease_take(record, ticket.id, ticket.gateway, GRANT_TTL, ticket.kv)
      virtual_time_reaches(ticket.start)
      for _, id in ipairs(overtaken) do redis.call("HINCRBY", ticket_key(id), "passed", 1) end
      redis.call("PUBLISH", ticket.channel, ticket.id)
      if ticket.id == newcomer then newcomer = nil end
      granted = granted + 1
    end
  end
  return granted
end

local function grant_all(passed)
  return grant(redis.call("SMEMBERS", workers_key), passed)
end

-- Writes what a ticket bids: `rows` of ARGV from `first` are pairs of a worker and its bid.
local function bids_write(id, elsewhere, left_out, deadline, hold, first, last)
  local by = tonumber(deadline) > 0 and exact(now + tonumber(deadline)) or "0"
  local fields = {"elsewhere", elsewhere, "not", left_out, "deadline", by, "hold", hold}
  for i = first, last, 2 do
    fields[#fields + 1] = "b:" .. ARGV[i]
    fields[#fields + 1] = ARGV[i + 1]
  end
  redis.call("HSET", ticket_key(id), unpack(fields))
end

-- Puts a ticket in the line at its rank.
local function ticket_file(id, channel, ttl, team, share, start, rank)
  redis.call("HSET", ticket_key(id), "gateway", GATEWAY, "channel", channel, "until", exact(now + ttl), "team", team,
    "share", exact(share), "start", exact(start), "rank", exact(rank), "at", exact(now))
  redis.call("HINCRBY", fair_key, "n:" .. team, 1)
  redis.call("ZADD", queue_key, exact(rank), id)
  redis.call("ZADD", tickets_key, now + ttl, id)
end

-- Makes a claimed lease of a grant. Returns how often its ticket was overtaken.
local function grant_claim(worker, id, ttl)
  redis.call("ZADD", worker_leases_key(worker), now + ttl, id)
  local ticket = redis.call("HMGET", ticket_key(id), "team", "share", "passed")
  if ticket[1] then
    redis.call("HSET", lease_key(id), "team", ticket[1], "share", ticket[2])
    ticket_forget(id, ticket[1])
  end
  return tonumber(ticket[3]) or 0
end
