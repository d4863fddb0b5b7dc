-- Frees what dead workers and gateways hold, and grants the slots that come free. Any gateway may run it at any time.
--
--   ARGV[4]  ms within which a sweep is left out if another one ran; 0: this one always runs
-- Result: {leases freed, tickets dropped, grants made, tickets waiting}
--
-- Keeps: after it, every lease is unexpired and of a live process, every ticket has a gateway that re-reads it, and no
-- slot is free while one of the first WINDOW x WINDOWS_OF_ALL tickets is better off with it. No team is without a slot
-- for long while another one holds all. Running it again at once changes nothing.

-- After a clock was set back, expiries lie far ahead, and keys that another program wrote may have none. What lies
-- beyond FARTHEST ms is moved to NEAR ms from now; live gateways and workers renew theirs before that.
local FARTHEST, NEAR = 120000, 6000
local pause = tonumber(ARGV[4])
local LOOKED_AT = 1024 -- tickets, which may be owed a loan: a place beyond a worker's slots

-- Moves a key's expiry near, if it is too far. Returns whether there is such a key.
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

-- A gateway that left a grant unclaimed may be dead: this time, the other gateways' tickets come first.
local granted = grant_all(missed)
if next(missed) then granted = granted + grant_all() end
local waiting = redis.call("ZCARD", queue_key)
if waiting > 0 then
  local lent = lend_to_line(LOOKED_AT)
  granted, waiting = granted + lent, waiting - lent
end
-- The model has no call: virtual time begins anew, long before its numbers grow too large to be exact.
if waiting == 0 and redis.call("EXISTS", leased_key, tickets_key) == 0 then redis.call("DEL", fair_key) end
return {freed, dropped, granted, waiting}
