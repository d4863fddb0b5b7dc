-- What `release` begins with: gives a slot back where nobody waits for one.
--
-- It makes no functions, which alone would take a third of its time, and reads and writes each thing once. Where
-- anything is not as usual it changes nothing, and the rest of the script does what is to be done.
local call, match, format = redis.call, string.match, string.format

local function give_back(id)
  local fence, kv, share, worker, team =
      match(call("HGET", calls_key, id) or "", "^L (%d+) (%d+) (%S+) %S+ (%S+) %S+ %S+ %S*\n([^\n]*)$")
  if fence ~= ARGV[5] then return false end
  local team_field, worker_field = "t:" .. team, "w:" .. worker
  local read = call("HMGET", ledger_key, team_field, worker_field, "waits")
  if read[3] then
    ledger[team_field], ledger[worker_field], ledger.waits = read[1], read[2], read[3]
    return false
  end
  local finish, tickets, team_leases = match(read[1] or "", "^(%S+) (%d+) (%d+)$")
  local boot, leases, kv_leased, slots = match(read[2] or "", "^(%S+) (%d+) (%d+) (%d+)$")
  if not tonumber(finish) or not boot or call("ZREM", worker_leases_key(worker), id) == 0 then return false end
  call("HDEL", calls_key, id)
  if ARGV[6] ~= "" and tonumber(share) then finish = format("%.17g", finish + (ARGV[6] - share)) end
  local of_team = format("%s %s %d", finish, tickets, math.max(0, team_leases - 1))
  if leases == "1" then
    call("HSET", ledger_key, team_field, of_team)
    call("HDEL", ledger_key, worker_field)
  else
    call("HSET", ledger_key, team_field, of_team, worker_field,
      format("%s %d %d %s", boot, leases - 1, math.max(0, kv_leased - kv), slots))
  end
  return true
end

if give_back(ARGV[4]) then return 1 end
