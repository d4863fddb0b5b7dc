-- Frees what the dead have left and grants what that frees. Any gateway may run it at any time.
--
--   ARGV[4]  ms for which another sweep is left out unless it is urgent; 0: this one is
-- Result: {leases freed, tickets dropped, grants made, waiting}
--
-- Keeps: after it, every lease is unexpired and of a live process, every ticket has a gateway that re-reads it, and no slot
-- is free while one of the first WINDOW x WINDOWS_OF_ALL tickets is better off with it. No team has none for long while another one holds all. Running it again at once changes nothing.

-- A clock that was set back leaves ends that lie far ahead, and a stranger's writing may have none: they are drawn near, and
-- the living write theirs anew.
local FARTHEST, NEAR = 120000, 6000
local pause = tonumber(ARGV[4])
local LOOKED_AT = 1024 -- tickets, which may be owed a slot beyond a worker's own

-- Whether there is such a key.
local function draw_near(name)
  local left = redis.call("PTTL", name)
  if left > FARTHEST or left == -1 then redis.call("PEXPIRE", name, NEAR) end
  return left ~= -2
end

local function draw_near_all(ends)
  for _, id in ipairs(redis.call("ZRANGEBYSCORE", ends, string.format("(%d", now + FARTHEST), "+inf")) do
    redis.call("ZADD", ends, now + NEAR, id)
  end
end

draw_near(settling_key)
local pausing = redis.call("PTTL", swept_key)
if pausing > FARTHEST or pausing == -1 then redis.call("DEL", swept_key) end
if pause > 0 and not redis.call("SET", swept_key, "1", "PX", pause, "NX") then
  return {0, 0, 0, redis.call("ZCARD", queue_key)}
end
local freed, dropped, missed = 0, 0, {}

draw_near_all(tickets_key)
for _, id in ipairs(redis.call("ZRANGEBYSCORE", tickets_key, "-inf", now)) do
  local worker = redis.call("HGET", lease_key(id), "worker")
  ticket_drop(id)
  dropped = dropped + 1
  if worker then
    lease_drop(worker, id)
    freed = freed + 1
  end
end

local leased = redis.call("HKEYS", leased_key)
for _, worker in ipairs(leased) do
  local leases = worker_leases_key(worker)
  local before = redis.call("ZCARD", leases)
  if not draw_near(worker_key(worker)) then
    leases_drop_all(worker)
  else
    worker_record(worker)
    draw_near_all(leases)
    for _, id in ipairs(redis.call("ZRANGEBYSCORE", leases, "-inf", now)) do
      local gateway = redis.call("HGET", ticket_key(id), "gateway")
      if gateway then missed[gateway] = true end
      lease_drop(worker, id)
    end
  end
  freed = freed + before - redis.call("ZCARD", leases)
end

for _, worker in ipairs(workers_some()) do
  if not draw_near(worker_key(worker)) then redis.call("SREM", workers_key, worker) end
end

-- A gateway that left a grant unclaimed may be dead: the others' tickets first, this once.
local granted = grant_all(missed)
if next(missed) then granted = granted + grant_all() end
local waiting = redis.call("ZCARD", queue_key)
if waiting > 0 then
  local lent = lend_to_line(LOOKED_AT)
  granted, waiting = granted + lent, waiting - lent
end
-- Nobody is there: virtual time begins anew, long before its numbers lose their digits.
if waiting == 0 and redis.call("EXISTS", leased_key, tickets_key) == 0 then redis.call("DEL", fair_key) end
return {freed, dropped, granted, waiting}
