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
local pause = tonumber(ARGV[4])
local LOOKED_AT = 1024 -- tickets, which may be owed a loan: a place beyond a worker's slots
local grant_all, workers_some = select(2, line())
local _, call_drop = tickets()

-- Moves a key's expiry near, if it is too far. Returns whether there is such a key.
local function draw_near(name)
  local left = call("PTTL", name)
  if left > FARTHEST or left == -1 then call("PEXPIRE", name, NEAR) end
  return left ~= -2
end

local function draw_near_all(ends)
  for _, id in ipairs(call("ZRANGEBYSCORE", ends, format("(%d", now + FARTHEST), "+inf")) do
    call("ZADD", ends, now + NEAR, id)
  end
end

if not settling() then
  if ledger_get("settling") then ledger_set("settling", false) end
elseif tonumber(ledger_get("settling")) > now + FARTHEST then
  ledger_set("settling", format("%d", now + NEAR))
end
local pausing = call("PTTL", swept_key)
if pausing > FARTHEST or pausing == -1 then call("DEL", swept_key) end
if pause > 0 and not call("SET", swept_key, "1", "PX", pause, "NX") then
  local number = num_waiting()
  ledger_save()
  return {0, 0, 0, number}
end
local freed, dropped, missed = 0, 0, {}

draw_near_all(tickets_key)
for _, id in ipairs(call("ZRANGEBYSCORE", tickets_key, "-inf", now)) do
  if call_drop(id, call_read(id)) then freed = freed + 1 end
  dropped = dropped + 1
end

for _, worker in ipairs(workers_leased()) do
  local leases = worker_leases_key(worker)
  local before = call("ZCARD", leases)
  if not draw_near(worker_key(worker)) then
    leases_drop_all(worker)
  else
    worker_record(worker)
    draw_near_all(leases)
    for _, id in ipairs(call("ZRANGEBYSCORE", leases, "-inf", now)) do
      local lease = lease_read(call_read(id))
      if lease and lease.granted then missed[lease.gateway] = true end
      lease_drop(worker, id, lease)
    end
  end
  freed = freed + before - call("ZCARD", leases)
end

for _, worker in ipairs(workers_some()) do
  if not draw_near(worker_key(worker)) then call("SREM", workers_key, worker) end
end

-- A gateway that left a grant unclaimed may be dead: this time, the other gateways' tickets come first.
local granted = grant_all(missed)
if next(missed) then granted = granted + grant_all() end
local waiting = num_waiting()
if waiting > 0 then
  local lent = select(2, overdraft())(LOOKED_AT)
  granted, waiting = granted + lent, waiting - lent
end
-- A team that has nothing, and whose last call finishes no later than the virtual time, is as one that never asked.
-- Without this, the ledger of a model that is never idle had all teams there ever were, and each sweep read them.
local v = virtual_time()
for field, text in pairs(ledger) do
  local finish = text and string.sub(field, 1, 2) == "t:" and tonumber(match(text, "^(%S+) 0 0$"))
  if finish and finish <= v then ledger_set(field, false) end
end
ledger_save()
-- The model has no call: virtual time begins anew, long before its numbers grow too large to be exact.
if waiting == 0 and call("EXISTS", tickets_key) == 0 and not settling() and #workers_leased() == 0 then
  local fence = ledger_get("fence")
  call("DEL", ledger_key, calls_key, passed_key)
  if fence then call("HSET", ledger_key, "", LONG, "fence", fence) end
end
return {freed, dropped, granted, waiting}
