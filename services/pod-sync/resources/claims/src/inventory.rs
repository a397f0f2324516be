//! The claims on this node, and which pods use them. Decides which calls precede the start of a pod and
//! follow its end. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use crate::claim::{AllocatedClaim, AllocatedDevice, ClaimKey};
use crate::error::ClaimError;
use crate::requests::is_request;

/// The driver name that stands for all drivers, in metrics (`DRAResourceClaimsInUseAnyDriver`).
pub(crate) const ANY_DRIVER: &str = "<any>";

/// A device that a driver has prepared.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PreparedDevice {
    /// Name of the pool.
    pub pool: String,
    /// Name of the device in its pool.
    pub device: String,
    /// Identifies one of several allocations of the device.
    pub share: Option<String>,
    /// Requests of the claim that the device belongs to. Empty: all of them.
    pub requests: Vec<String>,
    /// Qualified names of CDI devices.
    pub cdi: Vec<String>,
}

/// The content of the checkpoint for one claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClaimRecord {
    /// UID of the claim.
    pub uid: String,
    /// UIDs of the pods that use the claim.
    pub pods: BTreeSet<String>,
    /// Prepared devices by driver. Each driver of the claim has an entry.
    pub drivers: BTreeMap<String, Vec<PreparedDevice>>,
}

impl ClaimRecord {
    /// Returns the CDI devices of a request, or of all if it is empty.
    fn cdi_of<'a>(&'a self, request: &'a str) -> impl Iterator<Item = &'a String> {
        self.devices_of(request).flat_map(|(_, device)| &device.cdi)
    }

    /// Returns the devices of a request, or all if it is empty, with the names of their drivers.
    pub fn devices_of<'a>(&'a self, request: &'a str) -> impl Iterator<Item = (&'a str, &'a PreparedDevice)> {
        let all = self
            .drivers
            .iter()
            .flat_map(|(driver, devices)| devices.iter().map(|device| (driver.as_str(), device)));
        all.filter(move |(_, device)| {
            let of_request = |reported: &String| is_request(request, reported);
            request.is_empty() || device.requests.is_empty() || device.requests.iter().any(of_request)
        })
    }
}

/// The state of a claim between two operations.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ClaimPhase {
    /// From the checkpoint, or after a failed operation: its drivers may have prepared it, and are called
    /// before the next start of a pod.
    Uncertain,
    /// All drivers have prepared these devices.
    Prepared(BTreeSet<AllocatedDevice>),
    /// An operation is in progress. No other one may begin.
    Busy,
}

/// The state of a claim, for views.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimStateView {
    /// From the checkpoint, or after a failed operation.
    Uncertain,
    /// All drivers have prepared the claim.
    Prepared,
    /// An operation is in progress.
    Busy,
}

#[derive(Debug)]
struct TrackedClaim {
    record: ClaimRecord,
    phase: ClaimPhase,
    /// This process has prepared the claim with all of its drivers (`claimInfo.prepared` of the kubelet). It
    /// stays so until the claim is removed, whatever later calls return.
    is_in_use: bool,
}

impl TrackedClaim {
    fn new(record: ClaimRecord) -> Self {
        Self { record, phase: ClaimPhase::Uncertain, is_in_use: false }
    }
}

/// A claim in a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimCall {
    /// Namespace and name of the claim.
    pub key: ClaimKey,
    /// UID of the claim.
    pub uid: String,
}

/// The calls of an operation: the claims by driver.
pub(crate) type Batches = BTreeMap<String, Vec<ClaimCall>>;

/// The beginning of an operation for the claims of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperationStart {
    /// An operation on this claim is in progress, and no other one has begun.
    Busy(ClaimKey),
    /// The calls to make. The claims in them are busy until the operation is finished. The record must be on
    /// disk before the calls.
    Begun(Batches),
}

/// The claims on this node.
#[derive(Debug, Default)]
pub struct ClaimInventory {
    claims: BTreeMap<ClaimKey, TrackedClaim>,
}

impl ClaimInventory {
    /// Returns the state after a restart.
    #[must_use]
    pub fn restored(records: BTreeMap<ClaimKey, ClaimRecord>) -> Self {
        Self { claims: records.into_iter().map(|(key, record)| (key, TrackedClaim::new(record))).collect() }
    }

    /// Returns the content of the checkpoint.
    #[must_use]
    pub fn records(&self) -> BTreeMap<ClaimKey, ClaimRecord> {
        self.claims.iter().map(|(key, claim)| (key.clone(), claim.record.clone())).collect()
    }

    /// Returns the record of a claim.
    #[must_use]
    pub fn record(&self, key: &ClaimKey) -> Option<&ClaimRecord> {
        self.claims.get(key).map(|claim| &claim.record)
    }

    /// Returns all claims with their states.
    pub fn claims(&self) -> impl Iterator<Item = (&ClaimKey, &ClaimRecord, ClaimStateView)> {
        self.claims.iter().map(|(key, claim)| {
            let state = match claim.phase {
                ClaimPhase::Uncertain => ClaimStateView::Uncertain,
                ClaimPhase::Prepared(_) => ClaimStateView::Prepared,
                ClaimPhase::Busy => ClaimStateView::Busy,
            };
            (key, &claim.record, state)
        })
    }

    /// Returns whether all of these claims are recorded for the pod.
    #[must_use]
    pub fn holds_all(&self, pod: &str, keys: &[ClaimKey]) -> bool {
        keys.iter().all(|key| self.record(key).is_some_and(|record| record.pods.contains(pod)))
    }

    /// Returns whether the devices of all of these claims are known, and recorded for the pod. After a call
    /// that failed, a claim may be recorded without.
    #[must_use]
    pub fn has_devices(&self, pod: &str, keys: &[ClaimKey]) -> bool {
        let is_known = |claim: &TrackedClaim| {
            let is_prepared = matches!(claim.phase, ClaimPhase::Prepared(_));
            is_prepared || claim.record.drivers.values().all(|devices| !devices.is_empty())
        };
        self.holds_all(pod, keys) && keys.iter().all(|key| self.claims.get(key).is_some_and(is_known))
    }

    /// Returns whether a claim is recorded for the pod (`PodMightNeedToUnprepareResources`).
    #[must_use]
    pub fn holds_any(&self, pod: &str) -> bool {
        self.claims.values().any(|claim| claim.record.pods.contains(pod))
    }

    /// Returns the UIDs of all pods with a claim.
    #[must_use]
    pub fn pods(&self) -> BTreeSet<String> {
        self.claims.values().flat_map(|claim| claim.record.pods.iter().cloned()).collect()
    }

    /// Begins to prepare the claims of a pod, all or none. Claims that are prepared already are recorded for
    /// the pod, without a call.
    ///
    /// # Errors
    /// A claim cannot be prepared while an earlier one, or its earlier devices, are. Nothing has begun.
    pub fn begin_prepare(
        &mut self,
        pod: &str,
        claims: &[AllocatedClaim],
    ) -> Result<OperationStart, ClaimError> {
        for claim in claims {
            let Some(known) = self.claims.get(&claim.key) else { continue };
            match &known.phase {
                ClaimPhase::Busy => return Ok(OperationStart::Busy(claim.key.clone())),
                ClaimPhase::Prepared(devices)
                    if known.record.uid == claim.uid && *devices != claim.devices =>
                {
                    return Err(ClaimError::Reallocated(claim.key.name.clone()));
                }
                ClaimPhase::Prepared(_) | ClaimPhase::Uncertain => {}
            }
            if known.record.uid != claim.uid {
                let uid = known.record.uid.clone();
                return Err(ClaimError::Replaced { name: claim.key.name.clone(), uid });
            }
        }
        let mut batches = Batches::new();
        for claim in claims {
            let tracked = self.claims.entry(claim.key.clone()).or_insert_with(|| {
                TrackedClaim::new(ClaimRecord { uid: claim.uid.clone(), ..ClaimRecord::default() })
            });
            tracked.record.pods.insert(pod.to_owned());
            match tracked.phase {
                // Two entries of the pod may name one claim.
                ClaimPhase::Prepared(_) | ClaimPhase::Busy => {}
                ClaimPhase::Uncertain => {
                    tracked.phase = ClaimPhase::Busy;
                    for driver in claim.drivers() {
                        tracked.record.drivers.entry(driver.to_owned()).or_default();
                        let call = ClaimCall { key: claim.key.clone(), uid: claim.uid.clone() };
                        batches.entry(driver.to_owned()).or_default().push(call);
                    }
                }
            }
        }
        Ok(OperationStart::Begun(batches))
    }

    /// Records the devices that a driver has prepared, in place of earlier ones.
    pub fn set_devices(&mut self, key: &ClaimKey, driver: &str, devices: Vec<PreparedDevice>) {
        if let Some(claim) = self.claims.get_mut(key) {
            claim.record.drivers.insert(driver.to_owned(), devices);
        }
    }

    /// Ends [`ClaimInventory::begin_prepare`]. After a failure the pod stays recorded: a driver may have
    /// prepared its part.
    pub fn finish_prepare(&mut self, claims: &[AllocatedClaim], is_prepared: bool) {
        for claim in claims {
            if let Some(tracked) = self.claims.get_mut(&claim.key)
                && tracked.phase == ClaimPhase::Busy
            {
                tracked.phase = match is_prepared {
                    true => ClaimPhase::Prepared(claim.devices.clone()),
                    false => ClaimPhase::Uncertain,
                };
                tracked.is_in_use |= is_prepared;
            }
        }
    }

    /// Records the claims of a pod that has run without a record. Its drivers may have prepared them. There
    /// is no call.
    pub fn adopt(&mut self, pod: &str, claims: &[AllocatedClaim]) -> OperationStart {
        let busy = |claim: &&AllocatedClaim| {
            self.claims.get(&claim.key).is_some_and(|known| known.phase == ClaimPhase::Busy)
        };
        if let Some(claim) = claims.iter().find(busy) {
            return OperationStart::Busy(claim.key.clone());
        }
        for claim in claims {
            let tracked = self.claims.entry(claim.key.clone()).or_insert_with(|| {
                TrackedClaim::new(ClaimRecord { uid: claim.uid.clone(), ..ClaimRecord::default() })
            });
            // An earlier claim of the name belongs to other pods.
            if tracked.record.uid == claim.uid {
                tracked.record.pods.insert(pod.to_owned());
                for driver in claim.drivers() {
                    tracked.record.drivers.entry(driver.to_owned()).or_default();
                }
            }
        }
        OperationStart::Begun(Batches::new())
    }

    /// Records another pod for those of its claims that are recorded, so that they are not unprepared before
    /// its end. A claim in an operation is left as it is.
    pub fn share(&mut self, pod: &str, keys: &[ClaimKey]) {
        for key in keys {
            if let Some(claim) = self.claims.get_mut(key)
                && claim.phase != ClaimPhase::Busy
            {
                claim.record.pods.insert(pod.to_owned());
            }
        }
    }

    /// Begins to unprepare the claims of a pod whose containers have ended. Claims that other pods use are
    /// released without a call. The record has the claims of the pod, whatever its object says.
    #[must_use]
    pub fn begin_unprepare(&mut self, pod: &str) -> OperationStart {
        let mut held = self.claims.iter().filter(|(_, claim)| claim.record.pods.contains(pod));
        if let Some((key, _)) = held.find(|(_, claim)| claim.phase == ClaimPhase::Busy) {
            return OperationStart::Busy(key.clone());
        }
        let mut batches = Batches::new();
        for (key, claim) in &mut self.claims {
            if !claim.record.pods.contains(pod) {
                continue;
            }
            if claim.record.pods.len() > 1 {
                claim.record.pods.remove(pod);
                continue;
            }
            claim.phase = ClaimPhase::Busy;
            for driver in claim.record.drivers.keys() {
                let call = ClaimCall { key: key.clone(), uid: claim.record.uid.clone() };
                batches.entry(driver.clone()).or_default().push(call);
            }
        }
        OperationStart::Begun(batches)
    }

    /// Ends [`ClaimInventory::begin_unprepare`]. Claims that all their drivers have unprepared are removed.
    /// The others stay recorded for the pod, and are prepared again before another pod starts with them.
    pub fn finish_unprepare(&mut self, pod: &str, failed: &BTreeSet<ClaimKey>) {
        self.claims.retain(|key, claim| {
            let is_of_pod = claim.phase == ClaimPhase::Busy && claim.record.pods.contains(pod);
            if !is_of_pod {
                return true;
            }
            claim.phase = ClaimPhase::Uncertain;
            failed.contains(key)
        });
    }

    /// Returns the CDI devices for the requests of a container, each once.
    ///
    /// # Errors
    /// A claim is not recorded for the pod.
    pub fn cdi_devices(
        &self,
        pod: &str,
        namespace: &str,
        requests: &BTreeMap<String, Vec<String>>,
    ) -> Result<Vec<String>, ClaimError> {
        let mut names = Vec::new();
        let mut seen = BTreeSet::new();
        for (claim, requests) in requests {
            let key = ClaimKey { namespace: namespace.to_owned(), name: claim.clone() };
            let record = self.record(&key).filter(|record| record.pods.contains(pod));
            let Some(record) = record else {
                return Err(ClaimError::NotPrepared { namespace: key.namespace, name: key.name });
            };
            let all = requests.iter().flat_map(|request| record.cdi_of(request));
            names.extend(all.filter(|name| seen.insert((*name).clone())).cloned());
        }
        Ok(names)
    }

    /// Returns the pods with a claim that has one of these devices of a driver (pool and device).
    #[must_use]
    pub fn users_of(&self, driver: &str, devices: &BTreeSet<(String, String)>) -> BTreeSet<String> {
        let uses = |claim: &&TrackedClaim| {
            let held = claim.record.drivers.get(driver).into_iter().flatten();
            held.into_iter().any(|device| devices.contains(&(device.pool.clone(), device.device.clone())))
        };
        let claims = self.claims.values().filter(uses);
        claims.flat_map(|claim| claim.record.pods.iter().cloned()).collect()
    }

    /// Returns the number of claims in use by driver, and of all as `ANY_DRIVER`, as the kubelet counts
    /// them: those that this process has prepared. A claim of the checkpoint does not count before the next
    /// start of a pod with it (`pkg/kubelet/cm/dra: claimsInUse`).
    #[must_use]
    pub fn in_use(&self) -> BTreeMap<String, i64> {
        let mut counts = BTreeMap::from([(ANY_DRIVER.to_owned(), 0_i64)]);
        for claim in self.claims.values() {
            if !claim.is_in_use {
                continue;
            }
            let drivers = claim.record.drivers.keys().map(String::as_str);
            for driver in drivers.chain([ANY_DRIVER]) {
                let count = counts.entry(driver.to_owned()).or_default();
                *count = count.saturating_add(1);
            }
        }
        counts
    }
}

#[cfg(test)]
mod tests;
