-- What the admission scripts share. Prepended to each of them, below the key names (made from workers/protocol/keys.py).
--
-- Every script:
--   KEYS[1]  prefix of the model's keys, its hash tag included; all other names are built from it
--   ARGV[1]  protocol version; workers of another one are never leased
--   ARGV[2]  lifetime of a grant, ms
--   ARGV[3]  id of the gateway that calls
-- The clock is this server's.
local PROTOCOL, GRANT_TTL, GATEWAY = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]

local clock = redis.call("TIME")
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function ticket_drop(id)
  redis.call("ZREM", queue_key, id)
  redis.call("ZREM", tickets_key, id)
  redis.call("DEL", ticket_key(id))
end

-- Frees a slot. If the lease was a grant that nobody claimed, its ticket goes back to its old place.
local function lease_drop(worker, id)
  redis.call("ZREM", worker_leases_key(worker), id)
  redis.call("DEL", lease_key(id))
  local arrival = redis.call("HGET", ticket_key(id), "arrival")
  if arrival then redis.call("ZADD", queue_key, arrival, id) end
end

local function leases_drop_all(worker)
  for _, id in ipairs(redis.call("ZRANGE", worker_leases_key(worker), 0, -1)) do lease_drop(worker, id) end
  redis.call("HDEL", leased_key, worker)
end

-- A live worker's record, or nil. What an earlier process of that worker held is void and freed here.
local function worker_record(worker)
  local fields = redis.call("HMGET", worker_key(worker), "boot", "address", "protocol", "slots", "kv", "kv_used")
  if not fields[1] or tonumber(fields[3]) ~= PROTOCOL then return nil end
  local boot = redis.call("HGET", leased_key, worker)
  if boot and boot ~= fields[1] then leases_drop_all(worker) end
  return {boot = fields[1], address = fields[2], slots = tonumber(fields[4])}
end

local function leases_count(worker)
  return redis.call("ZCOUNT", worker_leases_key(worker), "(" .. string.format("%d", now), "+inf")
end

-- Free slots of a worker (0 when it is gone, drains or speaks another protocol) and its record.
local function slots_free(worker)
  local record = worker_record(worker)
  if not record then return 0 end
  return record.slots - leases_count(worker), record
end

-- Takes a slot that the caller found free. Returns the lease's fencing token.
local function lease_take(worker, record, id, gateway, ttl, fence)
  fence = fence or redis.call("INCR", fence_key)
  redis.call("HSET", lease_key(id), "worker", worker, "boot", record.boot, "address", record.address,
    "gateway", gateway, "fence", fence)
  redis.call("ZADD", worker_leases_key(worker), now + ttl, id)
  redis.call("HSET", leased_key, worker, record.boot)
  return fence
end

-- What a gateway is told of a lease that it holds now.
local function lease_reply(id)
  local lease = redis.call("HMGET", lease_key(id), "fence", "worker", "boot", "address")
  return {"lease", tonumber(lease[1]), lease[2], lease[3], lease[4], leases_count(lease[2])}
end

-- Redis has lost its data: calls run on slots that look free. Until every gateway has had time to renew its leases,
-- nothing is granted; those who come get tickets.
local function settle(for_ms)
  redis.call("SET", settling_key, "1", "PX", for_ms, "NX")
end

local function settling()
  return redis.call("EXISTS", settling_key) == 1
end

local function as_set(list)
  local set = {}
  for _, item in ipairs(list) do set[item] = true end
  return set
end

-- Of the open workers, the one with most free slots that is not avoided; equals take turns by arrival number.
local function most_free(open, avoided, turn)
  local best
  for i = 1, #open do
    local candidate = open[(i + turn) % #open + 1]
    if candidate.free > 0 and not avoided[candidate.worker] and (not best or candidate.free > best.free) then
      best = candidate
    end
  end
  return best
end

-- Whether some worker lives, undrained, that is not avoided.
local function another_lives(avoided)
  for _, worker in ipairs(redis.call("SMEMBERS", workers_key)) do
    if not avoided[worker] then
      local record = worker_record(worker)
      if record and record.slots > 0 then return true end
    end
  end
  return false
end

local function choose(open, id)
  local ticket = redis.call("HMGET", ticket_key(id), "avoid", "arrival")
  local turn = tonumber(ticket[2]) or 0
  if not ticket[1] or ticket[1] == "" then return most_free(open, {}, turn) end
  local avoided = as_set(cjson.decode(ticket[1]))
  local best = most_free(open, avoided, turn)
  if best or another_lives(avoided) then return best end
  return most_free(open, {}, turn)
end

-- Hands the free slots of these workers to waiting tickets, oldest first. A ticket that must not go to any of them
-- keeps its place, so do those of the gateways in `passed`. Dead tickets met on the way are dropped. Returns how many
-- grants were made.
local function grant(workers, passed)
  if redis.call("ZCARD", queue_key) == 0 or settling() then return 0 end
  local open, left, granted, at = {}, 0, 0, 0
  for _, worker in ipairs(workers) do
    local free, record = slots_free(worker)
    if free > 0 then
      open[#open + 1] = {worker = worker, record = record, free = free}
      left = left + free
    end
  end
  while left > 0 do
    local id = redis.call("ZRANGE", queue_key, at, at)[1]
    if not id then break end
    local expiry = tonumber(redis.call("ZSCORE", tickets_key, id) or 0)
    local ticket = redis.call("HMGET", ticket_key(id), "gateway", "channel")
    local best = expiry > now and not (passed and passed[ticket[1]]) and choose(open, id)
    if expiry <= now then
      ticket_drop(id)
    elseif not best then
      at = at + 1
    else
      redis.call("ZREM", queue_key, id)
      lease_take(best.worker, best.record, id, ticket[1], GRANT_TTL)
      redis.call("PUBLISH", ticket[2], id)
      best.free, left, granted = best.free - 1, left - 1, granted + 1
    end
  end
  return granted
end

local function grant_all(passed)
  return grant(redis.call("SMEMBERS", workers_key), passed)
end

-- Puts a ticket in the line at its arrival number.
local function ticket_file(id, channel, arrival, ttl, avoid)
  redis.call("HSET", ticket_key(id), "gateway", GATEWAY, "channel", channel, "arrival", arrival, "avoid", avoid)
  redis.call("ZADD", queue_key, arrival, id)
  redis.call("ZADD", tickets_key, now + ttl, id)
end

-- Makes a claimed lease of a grant.
local function grant_claim(worker, id, ttl)
  redis.call("ZADD", worker_leases_key(worker), now + ttl, id)
  redis.call("ZREM", tickets_key, id)
  redis.call("DEL", ticket_key(id))
end
