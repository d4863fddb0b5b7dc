-- Counts what a gateway process has admitted, or given back, without Redis; or all it knows, if counters were lost.
--
--   ARGV[4]  "1": with this the process has reported all in the present round
--   ARGV[5]  "1": all it knows, as counters were lost
--   ARGV[6+] per subject: its name; its calls under way at this process: "=n", or n more; "tick requests tokens", its
--            window when this process last heard of it ("": not told); "tick requests tokens tick ...": calls of this
--            process to add to the window, tokens and requests also less than 0; number of periods; and per period its
--            field (`d`, `m`, `b:...`), when it begins, what was counted in it when last heard of, and what to add
-- Result: {1}; {3}, {4, tick}: limits_gate.lua
--
-- Keeps: what is told counts, whatever the limits are.
local merge = limits_merge()
local now_tick, calls_key, at = floor(now / TICK), limits_calls_key(ARGV[1]), 6

local function tell_window(key, w, told, known)
  local entries, sum_r, sum_t = merge.taken(key, w), 0, 0
  for tick, r, t in string.gmatch(told, "(%d+) (-?%d+) (-?%d+)") do
    merge.add(entries, math.min(tonumber(tick), now_tick), tonumber(r), tonumber(t))
    sum_r, sum_t = sum_r + r, sum_t + t
  end
  if ARGV[5] == "1" then merge.explain(key, entries, sum_r, sum_t) end
  merge.put(key, w, entries, now_tick)
  local tick, r, t = match(known, "^(%d+) (%d+) (%d+)$")
  if tick then
    local before_tick, before_r, before_t = match(call("HGET", key, "f") or "0 0 0", "^(%d+) (%d+) (%d+)$")
    if w.open == "" then before_tick, before_r, before_t = 0, 0, 0 end
    call("HSET", key, "f", format("%d %.0f %.0f", math.max(tick, before_tick), math.max(r, before_r),
      math.max(t, before_t)))
    w.open = " f"
  end
  call("HSET", key, "w", window_text(w))
end

while ARGV[at] do
  local name, calls, known, told, periods = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4])
  local key, ttl = limits_subject_key(name), KEPT
  local read = call("HMGET", key, "w", "c")
  if told ~= "" or known ~= "" then tell_window(key, window_of(key, read[1], now_tick), told, known) end
  local before = tonumber(call("HGET", calls_key, name)) or 0
  local more = calls:sub(1, 1) == "=" and calls:sub(2) - before or tonumber(calls)
  if more ~= 0 then
    call("HSET", key, "c", format("%s %d", born, math.max(0, calls_of(read[2]) + more)))
    if before + more > 0 then call("HSET", calls_key, name, before + more) else call("HDEL", calls_key, name) end
  end
  for number = 0, periods - 1 do
    local field, begin, base, add = unpack(ARGV, at + 5 + 4 * number, at + 8 + 4 * number)
    local value, counted = period_of(call("HGET", key, field), begin)
    if tonumber(counted) == tonumber(begin) then
      call("HSET", key, field, format("%s %.0f", begin, math.max(0, math.max(value, base) + add)))
    end
    ttl = KEPT_PERIODS
  end
  call("PEXPIRE", key, ttl)
  at = at + 5 + 4 * periods
end

if ARGV[4] == "1" then
  call("HSET", log_key, "round", round[1])
  call("HSET", limits_round_key, "in:" .. ARGV[1], 1)
  call("HDEL", limits_round_key, "missing")
  if call("HGET", limits_round_key, "all") ~= "1" then
    local waits = false
    for _, process in ipairs(call("ZRANGEBYSCORE", limits_gateways_key, now - 1500, "+inf")) do
      waits = waits or call("HEXISTS", limits_round_key, "in:" .. process) == 0
    end
    if not waits then call("HSET", limits_round_key, "until", 0) end
  end
end
ran(0)
return {1}
