-- Shows that a gateway process is alive, ends the calls of those that are not, and tells what others have used.
--
--   ARGV[1]  id of the gateway process
--   ARGV[2]  its epoch
--   ARGV[3]  unix ms since which to tell what was used; "": the process ends, and its calls with it
--   ARGV[4]  how long a process counts as alive without a sign, ms
--   ARGV[5+] the subjects that its calls have counted for since its last pulse, each with the fields of its budgets
--            behind it, separated by line ends
-- Result: {now, {process, ms since its sign, ...}, {when, subject with fields, values of w, c, d, m and the fields,
-- when, ...}}; {}: the process must begin anew (`limits_begin`)
--
-- Keeps: calls of a gateway process without a sign of life count no more.
local dead = now - ARGV[4]

local function end_calls(process)
  local calls_key = limits_calls_key(process)
  local held = call("HGETALL", calls_key)
  for at = 1, #held, 2 do
    local key = limits_subject_key(held[at])
    local born, calls = match(call("HGET", key, "c") or "", "^(%d+) (%d+)$")
    if born then call("HSET", key, "c", format("%s %d", born, math.max(0, calls - held[at + 1]))) end
  end
  call("DEL", calls_key)
  call("ZREM", limits_gateways_key, process)
  local log_key = limits_log_key(process)
  if call("EXISTS", log_key) == 1 then call("HSET", log_key, "epoch", "") end
end

local log_key = limits_log_key(ARGV[1])
local log = call("HMGET", log_key, "epoch", "round")
if not log[1] or log[1] ~= ARGV[2] or log[2] ~= call("HGET", limits_round_key, "id") then return {} end
if ARGV[3] == "" then
  end_calls(ARGV[1])
  return {now, {}, {}}
end
call("ZADD", limits_gateways_key, now, ARGV[1])
call("PEXPIRE", log_key, KEPT)
for _, process in ipairs(call("ZRANGEBYSCORE", limits_gateways_key, "-inf", dead)) do end_calls(process) end
for at = 5, #ARGV do call("ZADD", limits_used_key, now, ARGV[at]) end
call("ZREMRANGEBYSCORE", limits_used_key, "-inf", now - (WINDOW + 1) * TICK)

local gateways = call("ZRANGE", limits_gateways_key, 0, -1, "WITHSCORES")
for at = 2, #gateways, 2 do gateways[at] = math.max(0, now - gateways[at]) end
local used, told = call("ZRANGEBYSCORE", limits_used_key, ARGV[3], "+inf", "WITHSCORES", "LIMIT", 0, 300), {}
for at = 1, #used, 2 do
  local fields, name = {"w", "c", "d", "m"}, match(used[at], "^[^\n]*")
  for field in string.gmatch(used[at]:sub(#name + 1), "[^\n]+") do fields[#fields + 1] = field end
  told[#told + 1], told[#told + 2] = tonumber(used[at + 1]), used[at]
  for _, value in ipairs(call("HMGET", limits_subject_key(name), unpack(fields))) do
    told[#told + 1] = value or ""
  end
end
return {now, gateways, told}
