-- What `acquire` begins with: takes a slot where nobody waits and the best worker has one, as most calls find it.
--
-- It makes no functions, which alone would take a third of its time, and reads and writes each thing once. Where
-- anything is not as usual it changes nothing, and the rest of the script does what is to be done.
local call, match, format = redis.call, string.match, string.format
local id, team, share, worker, kv, most = ARGV[4], ARGV[6], ARGV[7], ARGV[9], tonumber(ARGV[10]), 2 ^ 48

local function take()
  local team_field, worker_field = "t:" .. team, "w:" .. worker
  local read = call("HMGET", ledger_key, team_field, worker_field, "v", "fence", "settling", "waits", "")
  if read[5] or read[6] or not read[7] or worker == "" then
    ledger[team_field], ledger[worker_field], ledger.v, ledger.fence = read[1], read[2], read[3], read[4]
    ledger.settling, ledger.waits, ledger[""] = read[5], read[6], read[7]
    return nil
  end
  local finish, tickets, team_leases = match(read[1] or "0 0 0", "^(%S+) (%d+) (%d+)$")
  local boot, protocol, slots, cells, kv_used, draining, address = match(
    call("HGET", worker_key(worker), "placing") or "", "^(%S+) (%d+) (%d+) (%d+) (%d+) ([01]) %d+ (%S*)$")
  if not tonumber(finish) or protocol ~= ARGV[1] or draining ~= "0" then return nil end
  local leased_boot, leases, kv_leased
  if read[2] then
    leased_boot, leases, kv_leased = match(read[2], "^(%S+) (%d+) (%d+) %d+$")
  elseif call("ZCARD", worker_leases_key(worker)) == 0 then
    leased_boot, leases, kv_leased = boot, 0, 0
  end
  if leased_boot ~= boot then return nil end
  leases, slots, cells, kv_leased, kv_used =
      tonumber(leases), tonumber(slots), tonumber(cells), tonumber(kv_leased), tonumber(kv_used)
  if leases >= slots or math.max(slots, cells, kv_used) > most then return nil end
  if leases > 0 and cells > 0 and kv > cells - math.max(kv_leased, kv_used) then return nil end
  local fence = format("%d", (tonumber(read[4]) or 0) + 1)
  local record = format("L %s %d %s %s %s %s %s %s\n%s",
    fence, kv, share, ARGV[8], worker, boot, ARGV[3], address, team)
  if call("HSETNX", calls_key, id, record) == 0 then return nil end
  local clock = call("TIME")
  call("ZADD", worker_leases_key(worker), clock[1] * 1000 + math.floor(clock[2] / 1000) + ARGV[5], id)
  local start = math.max(tonumber(read[3]) or 0, tonumber(finish))
  call("HSET", ledger_key, team_field, format("%.17g %s %d", start + share, tickets, team_leases + 1),
    worker_field, format("%s %d %d %d", boot, leases + 1, kv_leased + kv, slots), "fence", fence, "v", start)
  return {"lease", tonumber(fence), worker, boot, address}
end

local taken = take()
if taken then return taken end
