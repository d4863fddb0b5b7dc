-- What `reserve` and `settle` do with windows.

-- The window in a subject's field `w`, without ticks that are over.
local function window_of(key, text, tick)
  local b, r, t, head, head_tick, tail, last, last_r, last_t, open =
      match(text or "", "^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)( ?f?)$")
  if b ~= born then
    return {r = 0, t = 0, head = 1, head_tick = tick, tail = 1, tick = tick, last_r = 0, last_t = 0, open = ""}
  end
  local w = {r = tonumber(r), t = tonumber(t), head = tonumber(head), head_tick = tonumber(head_tick),
    tail = tonumber(tail), tick = tonumber(last), last_r = tonumber(last_r), last_t = tonumber(last_t), open = open}
  if w.tick > tick + WINDOW then -- Redis' clock was set back: what was counted ahead of it counts as of now
    for at = w.head, w.tail - 1 do call("HDEL", key, "e" .. at) end
    w.head, w.head_tick, w.tick, w.last_r, w.last_t, w.changed = w.tail, tick, tick, w.r, w.t, true
  end
  local oldest, entry = tick - WINDOW, nil
  while w.head < w.tail and w.head_tick < oldest do
    entry = entry or call("HGET", key, "e" .. w.head) or ""
    local _, gone_r, gone_t = match(entry, "^(%d+) (%d+) (%d+)$")
    w.r, w.t = w.r - (gone_r or 0), w.t - (gone_t or 0)
    call("HDEL", key, "e" .. w.head)
    w.head, w.changed = w.head + 1, true
    if w.head == w.tail then
      w.head_tick = w.tick
    else
      entry = call("HGET", key, "e" .. w.head) or ""
      w.head_tick = tonumber(match(entry, "^%d+")) or 0
    end
  end
  if w.head == w.tail and w.tick < oldest then
    w.r, w.t, w.last_r, w.last_t, w.tick, w.head_tick = 0, 0, 0, 0, tick, tick
  end
  return w
end

-- Counts in the window's newest tick, a new one if it is time. Adds what must be written to `sets`.
local function window_add(w, tick, requests, tokens, sets)
  if w.tick < tick then
    if w.last_r > 0 or w.last_t > 0 then
      sets[#sets + 1] = "e" .. w.tail
      sets[#sets + 1] = format("%d %.0f %.0f", w.tick, w.last_r, w.last_t)
      w.tail = w.tail + 1
    elseif w.head == w.tail then
      w.head_tick = tick
    end
    w.tick, w.last_r, w.last_t, w.is_new = tick, 0, 0, true
  end
  w.last_r, w.last_t = w.last_r + requests, w.last_t + tokens
  w.r, w.t = w.r + requests, w.t + tokens
end

local function window_text(w)
  return format("%s %.0f %.0f %d %d %d %d %.0f %.0f%s", born, w.r, w.t, w.head, w.head_tick, w.tail, w.tick,
    w.last_r, w.last_t, w.open)
end

-- What was counted in a period that begins at `begin`, and when the counted period begins: gateways' clocks differ.
local function period_of(text, begin)
  local counted, value = match(text or "", "^(%d+) (%d+)$")
  if not counted or tonumber(counted) < tonumber(begin) then return 0, begin end
  return tonumber(value), counted
end

local function calls_of(text)
  local b, calls = match(text or "", "^(%d+) (%d+)$")
  return b == born and tonumber(calls) or 0
end
