-- Rewrites a window whose ticks change in any order. The body of a function: few runs need what it makes.
local merge = {}

-- Takes the entries of a window out of its hash. Result: tick -> {requests, tokens}.
function merge.taken(key, w)
  local entries = {}
  for number = w.head, w.tail - 1 do
    local tick, r, t = match(call("HGET", key, "e" .. number) or "", "^(%d+) (%d+) (%d+)$")
    if tick then entries[tonumber(tick)] = {tonumber(r), tonumber(t)} end
    call("HDEL", key, "e" .. number)
  end
  merge.add(entries, w.tick, w.last_r, w.last_t)
  return entries
end

-- Adds to the entry of a tick, which may be less than 0, but leaves no less than 0 there.
function merge.add(entries, tick, requests, tokens)
  local entry = entries[tick] or {0, 0}
  entries[tick] = {math.max(0, entry[1] + requests), math.max(0, entry[2] + tokens)}
end

-- Makes `entries` the window; `w` is changed, and the caller writes it.
function merge.put(key, w, entries, now_tick)
  local ticks = {}
  for tick, entry in pairs(entries) do
    if tick >= now_tick - WINDOW and (entry[1] > 0 or entry[2] > 0) then ticks[#ticks + 1] = tick end
  end
  table.sort(ticks)
  w.r, w.t, w.head, w.tail = 0, 0, 1, math.max(1, #ticks)
  w.tick, w.last_r, w.last_t = now_tick, 0, 0
  w.head_tick = ticks[1] or now_tick
  for number, tick in ipairs(ticks) do
    local r, t = unpack(entries[tick])
    w.r, w.t = w.r + r, w.t + t
    if number < #ticks then
      call("HSET", key, "e" .. number, format("%d %.0f %.0f", tick, r, t))
    else
      w.tick, w.last_r, w.last_t = tick, r, t
    end
  end
  w.changed = true
end

-- Whether a gateway process that was there in the last minute has not reported in this round.
local function is_missing()
  local known = call("HGET", limits_round_key, "missing")
  if not known then
    known = "0"
    for _, field in ipairs(call("HKEYS", limits_round_key)) do
      local process = match(field, "^seen:(.*)$")
      if process and call("HEXISTS", limits_round_key, "in:" .. process) == 0 then known = "1" end
    end
    call("HSET", limits_round_key, "missing", known)
  end
  return known == "1"
end

-- Compares what was told of a window as a whole with what gateways have reported of themselves, and counts the rest,
-- of those that did not report, in the latest tick in which it can have been admitted.
function merge.close(key, w, now_tick)
  local tick, r, t = match(call("HGET", key, "f") or "", "^(%d+) (%d+) (%d+)$")
  call("HDEL", key, "f")
  w.open, w.changed = "", true
  tick = tonumber(tick)
  if not tick or tick < now_tick - WINDOW or not is_missing() then return w end
  local entries, rest_r, rest_t = merge.taken(key, w), tonumber(r), tonumber(t)
  for when, entry in pairs(entries) do
    if when <= tick then rest_r, rest_t = rest_r - entry[1], rest_t - entry[2] end
  end
  rest_r, rest_t = math.max(0, rest_r), math.max(0, rest_t)
  merge.add(entries, tick, rest_r, rest_t)
  call("HSET", key, "u", format("%d %.0f %.0f", tick, rest_r, rest_t))
  merge.put(key, w, entries, now_tick)
  return w
end

-- Takes so much off what nobody had reported, as a gateway reports it now.
function merge.explain(key, entries, requests, tokens)
  local tick, r, t = match(call("HGET", key, "u") or "", "^(%d+) (%d+) (%d+)$")
  if not tick then return end
  local less_r, less_t = math.min(tonumber(r), math.max(0, requests)), math.min(tonumber(t), math.max(0, tokens))
  merge.add(entries, tonumber(tick), -less_r, -less_t)
  call("HSET", key, "u", format("%d %.0f %.0f", tick, r - less_r, t - less_t))
end

return merge
