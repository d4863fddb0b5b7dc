-- Keeps this gateway's leases alive.
--
--   ARGV[4]   lifetime of a lease, ms
--   ARGV[5]   how long to settle (shared.lua) if Redis has lost its data, ms
--   ARGV[6]   "away": this gateway was without Redis; "settle": other gateways were, too; otherwise ""
--   ARGV[7+]  per lease: id, fencing token (0: it was placed without Redis and has none), worker, boot, KV tokens,
--             team, the team's weight
-- Result: {ids of void leases, ids that found no free slot, {id, token, id, token, ...} of those that had no token}
--
-- A lease that Redis has lost, or that expired while its gateway was held up, is taken anew with its old token if a
-- slot of the same worker process is free: the call is still running there.
-- Keeps: no worker has more leases than slots and overdraft; a lease with another token, or for an earlier process,
-- stays as it is, and the caller is told that its own is void.
local lease_ttl, settle_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
local void, crowded, given = {}, {}, {}

-- Ends all grants that nobody has claimed; their tickets wait at their old places. For a Redis that hung: it then runs
-- the scripts sent meanwhile, and may grant slots on which gateways have placed calls without it.
local function grants_take_back()
  for _, worker in ipairs(workers_leased()) do
    for _, id in ipairs(call("ZRANGE", worker_leases_key(worker), 0, -1)) do
      local lease = lease_read(call_read(id))
      if lease and lease.granted then lease_drop(worker, id, lease) end
    end
  end
end

-- Gateways that were without Redis must first report their leases here. This one's follow below; so it settles only if
-- Redis has lost all leases (it has no fence), or other gateways were without it, too.
if ARGV[6] ~= "" and not ledger_get("fence") or ARGV[6] == "settle" then
  if not ledger_get("fence") then ledger_set("fence", "0") end
  if settle(settle_ms) then grants_take_back() end
end

local function give(id, fence)
  given[#given + 1] = id
  given[#given + 1] = tonumber(fence)
end

local function restore(id, fence, worker, boot, kv, team, weight)
  local record = worker_record(worker)
  if not record then
    crowded[#crowded + 1] = id
  elseif record.boot ~= boot then
    void[#void + 1] = id
  elseif record.slots + record.overdraft <= record.leases then
    crowded[#crowded + 1] = id
  else
    local token = lease_take(record, id, GATEWAY, lease_ttl, kv, fence, team, weight, "-")
    team_add(team, 0, 0, 1)
    if not fence then
      give(id, token)
    elseif (tonumber(ledger_get("fence")) or 0) < tonumber(fence) then
      ledger_set("fence", fence)
      settle(settle_ms)
    end
  end
end

for i = 7, #ARGV, 7 do
  local id, fence, worker, boot, kv = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], tonumber(ARGV[i + 4])
  local lease = lease_read(call_read(id))
  local holder = lease and lease.fence
  if fence == "0" then
    fence = nil
    -- It was given a token before, and that answer got lost.
    if holder and lease.gateway == GATEWAY then
      fence = holder
      give(id, fence)
    end
  end
  local expiry = tonumber(call("ZSCORE", worker_leases_key(worker), id))
  if holder and holder ~= fence then
    void[#void + 1] = id
  elseif holder and expiry and expiry > now then
    call("ZADD", worker_leases_key(worker), now + lease_ttl, id)
  else
    -- Where only its record is lost, as in a Redis that evicts keys, it still counts.
    if holder or expiry then lease_drop(worker, id, lease or {kv = kv, team = ARGV[i + 5]}) end
    restore(id, fence, worker, boot, kv, ARGV[i + 5], ARGV[i + 6])
  end
end
ledger_save()
return {void, crowded, given}
