-- Keeps this gateway's leases alive.
--
--   ARGV[4]   lifetime of a lease, ms
--   ARGV[5]   how long to settle where Redis turns out to have lost its data, ms
--   ARGV[6+]  per lease: id, fencing token, worker, boot
-- Result: {ids that are void, ids that found no free slot}
--
-- A lease that Redis has lost, or that expired while its gateway was held up, is taken anew with its old token when a slot
-- of the same process is free: the call is still running there.
-- Keeps: no worker has more leases than slots; a lease with another token or for an earlier process stays untouched and is
-- void to the caller.
local lease_ttl, settle_ms = tonumber(ARGV[4]), tonumber(ARGV[5])
local void, crowded = {}, {}

local function restore(id, fence, worker, boot)
  local record = worker_record(worker)
  if not record then
    crowded[#crowded + 1] = id
  elseif record.boot ~= boot then
    void[#void + 1] = id
  elseif record.slots <= leases_count(worker) then
    crowded[#crowded + 1] = id
  else
    lease_take(worker, record, id, GATEWAY, lease_ttl, fence)
    if tonumber(redis.call("GET", fence_key) or 0) < tonumber(fence) then
      redis.call("SET", fence_key, fence)
      settle(settle_ms)
    end
  end
end

for i = 6, #ARGV, 4 do
  local id, fence, worker, boot = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local holder = redis.call("HGET", lease_key(id), "fence")
  local expiry = tonumber(redis.call("ZSCORE", worker_leases_key(worker), id) or 0)
  if holder and holder ~= fence then
    void[#void + 1] = id
  elseif holder and expiry > now then
    redis.call("ZADD", worker_leases_key(worker), now + lease_ttl, id)
  else
    restore(id, fence, worker, boot)
  end
end
return {void, crowded}
