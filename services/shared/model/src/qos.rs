//! Computes QoS class, pod requests and limits, OOM scores and cgroup values
//! (`pkg/apis/core/v1/helper/qos`, `pkg/kubelet/qos`, `pkg/kubelet/cm: ResourceConfigForPod`).

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;

use crate::cpu_list::CpuList;
use crate::pod;
use crate::quantity::Quantity;

const CPU: &str = "cpu";
const MEMORY: &str = "memory";

const MIN_SHARES: u64 = 2;
const MAX_SHARES: u64 = 262_144;
const SHARES_PER_CPU: u64 = 1024;
/// Default CFS period, in microseconds.
pub const DEFAULT_PERIOD_US: u64 = 100_000;
const MIN_QUOTA_US: i64 = 1000;

/// Quantities by resource name.
pub type ResourceList = BTreeMap<String, Quantity>;

/// The quality-of-service class of a pod (`status.qosClass`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QosClass {
    /// No requests and no limits.
    BestEffort,
    /// Neither BestEffort nor Guaranteed.
    Burstable,
    /// Every container has limits, and requests equal them.
    Guaranteed,
}

impl QosClass {
    /// Returns the class as in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BestEffort => "BestEffort",
            Self::Burstable => "Burstable",
            Self::Guaranteed => "Guaranteed",
        }
    }

    /// Parses a class as in the API.
    #[must_use]
    pub fn parse(class: &str) -> Option<Self> {
        [Self::BestEffort, Self::Burstable, Self::Guaranteed].into_iter().find(|c| c.as_str() == class)
    }
}

impl fmt::Display for QosClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

fn list(api: Option<&BTreeMap<String, ApiQuantity>>) -> ResourceList {
    api.into_iter().flatten().map(|(k, v)| (k.clone(), Quantity::of(v))).collect()
}

/// Returns `resources.requests` of a container.
#[must_use]
pub fn container_requests(c: &Container) -> ResourceList {
    list(c.resources.as_ref().and_then(|r| r.requests.as_ref()))
}

/// Returns `resources.limits` of a container.
#[must_use]
pub fn container_limits(c: &Container) -> ResourceList {
    list(c.resources.as_ref().and_then(|r| r.limits.as_ref()))
}

/// Returns `spec.resources.requests` of a pod.
#[must_use]
pub fn pod_level_requests(pod: &Pod) -> ResourceList {
    list(pod_resources(pod).and_then(|own| own.requests.as_ref()))
}

/// Returns whether the pod has requests or limits of its own (`IsPodLevelResourcesSet`).
#[must_use]
pub fn has_pod_level_resources(pod: &Pod) -> bool {
    let lists = pod_resources(pod).into_iter().flat_map(|own| [&own.requests, &own.limits]);
    lists.flatten().flat_map(BTreeMap::keys).any(|name| pod_level(name))
}

/// Returns whether a container has limits of CPU and memory that equal its requests
/// (`IsContainerEquivalentQOSGuaranteed`).
#[must_use]
pub fn is_guaranteed_container(container: &Container) -> bool {
    let (requests, limits) = (container_requests(container), container_limits(container));
    [CPU, MEMORY].into_iter().all(|name| {
        let request = requests.get(name).copied().unwrap_or_default();
        request > Quantity::default() && limits.get(name) == Some(&request)
    })
}

fn add(into: &mut ResourceList, more: &ResourceList) {
    for (name, amount) in more {
        let slot = into.entry(name.clone()).or_default();
        *slot = *slot + *amount;
    }
}

fn raise(into: &mut ResourceList, other: &ResourceList) {
    for (name, amount) in other {
        let slot = into.entry(name.clone()).or_insert(*amount);
        if *amount > *slot {
            *slot = *amount;
        }
    }
}

fn pod_level(name: &str) -> bool {
    name == CPU || name == MEMORY || name.starts_with("hugepages-")
}

fn aggregate(pod: &Pod, amounts: impl Fn(&Container) -> ResourceList) -> ResourceList {
    let mut total = ResourceList::new();
    for c in &pod::spec(pod).containers {
        add(&mut total, &amounts(c));
    }
    let mut sidecars = ResourceList::new();
    let mut stages = ResourceList::new();
    for c in pod::init_containers(pod) {
        let own = amounts(c);
        if pod::is_sidecar(c) {
            add(&mut total, &own);
            add(&mut sidecars, &own);
            raise(&mut stages, &sidecars);
        } else {
            let mut step = sidecars.clone();
            add(&mut step, &own);
            raise(&mut stages, &step);
        }
    }
    raise(&mut total, &stages);
    total
}

fn replace_with_pod_level(total: &mut ResourceList, amounts: Option<&BTreeMap<String, ApiQuantity>>) {
    for (name, amount) in list(amounts) {
        if pod_level(&name) {
            total.insert(name, amount);
        }
    }
}

fn pod_resources(pod: &Pod) -> Option<&ResourceRequirements> {
    pod::spec(pod).resources.as_ref()
}

/// Returns the requests of a pod without overhead.
#[must_use]
pub fn pod_requests_without_overhead(pod: &Pod) -> ResourceList {
    let mut total = aggregate(pod, container_requests);
    replace_with_pod_level(&mut total, pod_resources(pod).and_then(|r| r.requests.as_ref()));
    total
}

/// Returns the limits of a pod without overhead.
#[must_use]
pub fn pod_limits_without_overhead(pod: &Pod) -> ResourceList {
    let mut total = aggregate(pod, container_limits);
    replace_with_pod_level(&mut total, pod_resources(pod).and_then(|r| r.limits.as_ref()));
    total
}

/// Returns the requests of a pod (`k8s.io/component-helpers/resource: PodRequests`).
#[must_use]
pub fn pod_requests(pod: &Pod) -> ResourceList {
    let mut total = pod_requests_without_overhead(pod);
    add(&mut total, &list(pod::spec(pod).overhead.as_ref()));
    total
}

/// Returns the limits of a pod. Overhead raises only limits that exist
/// (`k8s.io/component-helpers/resource: PodLimits`).
#[must_use]
pub fn pod_limits(pod: &Pod) -> ResourceList {
    let mut total = pod_limits_without_overhead(pod);
    for (name, amount) in list(pod::spec(pod).overhead.as_ref()) {
        if let Some(limit) = total.get_mut(&name).filter(|l| !l.is_zero()) {
            *limit = *limit + amount;
        }
    }
    total
}

/// Converts a list for an API object.
#[must_use]
pub fn to_api(list: &ResourceList) -> BTreeMap<String, ApiQuantity> {
    list.iter().map(|(k, v)| (k.clone(), v.to_api())).collect()
}

/// Returns the class in the pod's status, else the computed one.
#[must_use]
pub fn qos_class(pod: &Pod) -> QosClass {
    let reported = pod.status.as_ref().and_then(|s| QosClass::parse(s.qos_class.as_deref()?));
    reported.unwrap_or_else(|| compute_qos_class(pod))
}

/// Computes the class from CPU and memory of the pod level, or else of regular and init containers.
#[must_use]
pub fn compute_qos_class(pod: &Pod) -> QosClass {
    let considered = |l: ResourceList| -> ResourceList {
        l.into_iter().filter(|(k, v)| (k == CPU || k == MEMORY) && v.is_positive()).collect()
    };
    let mut requests = ResourceList::new();
    let mut limits = ResourceList::new();
    let mut all_limited = true;
    let own = pod_resources(pod).filter(|r| {
        let names = |l: &Option<BTreeMap<String, ApiQuantity>>| l.iter().flatten().any(|(k, _)| pod_level(k));
        names(&r.requests) || names(&r.limits)
    });
    if let Some(own) = own {
        requests = considered(list(own.requests.as_ref()));
        limits = considered(list(own.limits.as_ref()));
        all_limited = limits.len() == 2;
    } else {
        for c in pod::spec(pod).containers.iter().chain(pod::init_containers(pod)) {
            add(&mut requests, &considered(container_requests(c)));
            let own = considered(container_limits(c));
            all_limited &= own.len() == 2;
            add(&mut limits, &own);
        }
    }
    if requests.is_empty() && limits.is_empty() {
        QosClass::BestEffort
    } else if all_limited && requests == limits {
        QosClass::Guaranteed
    } else {
        QosClass::Burstable
    }
}

/// Converts millicores to cpu.shares.
#[must_use]
pub fn milli_to_shares(milli: i64) -> u64 {
    let milli = u64::try_from(milli).unwrap_or(0);
    (milli.saturating_mul(SHARES_PER_CPU) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// Converts millicores to a CFS quota in microseconds; 0 means no quota.
#[must_use]
pub fn milli_to_quota(milli: i64, period_us: u64) -> i64 {
    if milli <= 0 {
        return 0;
    }
    let quota = i128::from(milli).saturating_mul(i128::from(period_us)) / 1000;
    i64::try_from(quota).unwrap_or(i64::MAX).max(MIN_QUOTA_US)
}

/// Converts cpu.shares to millicores, rounded up.
#[must_use]
pub fn shares_to_milli(shares: i64) -> i64 {
    if shares < 2 {
        return 0;
    }
    let thousandfold = i128::from(shares).saturating_mul(1000);
    i64::try_from(thousandfold.saturating_add(1023) / 1024).unwrap_or(i64::MAX)
}

/// Converts a CFS quota to millicores; 0 without a quota.
#[must_use]
pub fn quota_to_milli(quota_us: i64, period_us: i64) -> i64 {
    if quota_us <= 0 || period_us <= 0 {
        return 0;
    }
    let milli = i128::from(quota_us).saturating_mul(1000).checked_div(i128::from(period_us));
    milli.and_then(|m| i64::try_from(m).ok()).unwrap_or(i64::MAX)
}

/// Converts cpu.shares to cpu.weight for cgroups of pods and QoS classes. Container weights are set by the
/// OCI runtime.
#[must_use]
pub fn shares_to_weight(shares: u64) -> u64 {
    let above = shares.clamp(MIN_SHARES, MAX_SHARES).saturating_sub(MIN_SHARES);
    (above.saturating_mul(9999) / 262_142).saturating_add(1)
}

/// Converts cpu.weight to cpu.shares.
#[must_use]
pub fn weight_to_shares(weight: u64) -> u64 {
    (weight.saturating_sub(1).saturating_mul(262_142) / 9999).saturating_add(2)
}

/// Returns a page size as in the CRI and in hugetlb file names: `2MB`, `1GB`.
#[must_use]
pub fn page_size_name(bytes: u64) -> String {
    let mut value = bytes;
    let mut units = ["KB", "MB", "GB", "TB"].into_iter();
    let mut unit = "B";
    while value >= 1024
        && value.is_multiple_of(1024)
        && let Some(larger) = units.next()
    {
        value /= 1024;
        unit = larger;
    }
    format!("{value}{unit}")
}

/// Values of a pod's cgroup. `None` leaves a value unchanged.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodCgroup {
    /// cpu.shares; cpu.weight by [`shares_to_weight`].
    pub cpu_shares: Option<u64>,
    /// Microseconds per period; -1 means no limit.
    pub cpu_quota_us: Option<i64>,
    /// Microseconds.
    pub cpu_period_us: Option<u64>,
    /// memory.max, in bytes.
    pub memory_bytes: Option<i64>,
    /// hugetlb limits in bytes, by page size as in the resource name (`2Mi`). Page sizes without an entry
    /// get 0.
    pub hugepages: BTreeMap<String, i64>,
    /// pids.max.
    pub pids: Option<i64>,
    /// memory.min of cgroup v2, in bytes: memory that the kernel never reclaims.
    pub memory_min: Option<i64>,
    /// memory.low of cgroup v2, in bytes: memory that the kernel reclaims last.
    pub memory_low: Option<i64>,
    /// cpuset.cpus: the CPUs of all processes.
    pub cpus: Option<CpuList>,
}

/// Current values of a pod's cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CgroupState {
    /// Bytes; `None` means no limit.
    pub memory_limit: Option<i64>,
    /// Bytes in use.
    pub memory_usage: i64,
    /// Microseconds per period; `None` means no limit.
    pub cpu_quota_us: Option<i64>,
    /// Value of `cpu.shares`.
    pub cpu_shares: u64,
    /// Memory that memory.min or memory.low protects, in bytes; `None` with cgroup v1.
    pub memory_protected: Option<i64>,
}

/// Node settings that apply to pod cgroups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupSettings {
    /// `cpuCFSQuota`.
    pub cfs_quota: bool,
    /// `cpuCFSQuotaPeriod`, in microseconds.
    pub period_us: u64,
    /// `podPidsLimit`; 0 or less means no limit.
    pub pids_limit: i64,
    /// Requests of memory are protected (`memoryReservationPolicy` is `TieredReservation`).
    pub protects_memory: bool,
}

impl Default for CgroupSettings {
    fn default() -> Self {
        Self { cfs_quota: true, period_us: DEFAULT_PERIOD_US, pids_limit: -1, protects_memory: false }
    }
}

/// Computes the values of a pod's cgroup (`pkg/kubelet/cm: ResourceConfigForPod`).
#[must_use]
pub fn pod_cgroup(pod: &Pod, settings: CgroupSettings) -> PodCgroup {
    let requests = pod_requests(pod);
    let limits = pod_limits(pod);
    let amount = |l: &ResourceList, name: &str| l.get(name).copied().unwrap_or_default();
    let shares = milli_to_shares(amount(&requests, CPU).milli_value());
    let quota = match milli_to_quota(amount(&limits, CPU).milli_value(), settings.period_us) {
        _ if !settings.cfs_quota => -1,
        quota => quota,
    };
    let memory = amount(&limits, MEMORY).value();
    // A limit applies to the pod only if every container has one.
    let limited = |name: &str| {
        let pod_level =
            pod_resources(pod).and_then(|r| r.limits.as_ref()).is_some_and(|l| l.contains_key(name));
        pod_level
            || pod::spec(pod)
                .containers
                .iter()
                .chain(pod::init_containers(pod))
                .all(|c| container_limits(c).get(name).is_some_and(|l| !l.is_zero()))
    };
    let hugepages = requests
        .iter()
        .filter_map(|(k, v)| Some((k.strip_prefix("hugepages-")?.to_owned(), v.value())))
        .collect();
    let mut cgroup =
        PodCgroup { hugepages, pids: Some(settings.pids_limit).filter(|p| *p > 0), ..PodCgroup::default() };
    let some = |value: i64| Some(value).filter(|v| *v != 0);
    match qos_class(pod) {
        QosClass::Guaranteed => {
            cgroup.cpu_shares = Some(shares);
            cgroup.cpu_quota_us = some(quota);
            cgroup.cpu_period_us = Some(settings.period_us);
            cgroup.memory_bytes = some(memory);
        }
        QosClass::Burstable => {
            cgroup.cpu_shares = Some(shares);
            if limited(CPU) {
                cgroup.cpu_quota_us = some(quota);
                cgroup.cpu_period_us = Some(settings.period_us);
            }
            if limited(MEMORY) {
                cgroup.memory_bytes = some(memory);
            }
        }
        QosClass::BestEffort => cgroup.cpu_shares = Some(MIN_SHARES),
    }
    let protected = if settings.protects_memory { amount(&requests, MEMORY).value() } else { 0 };
    // A protection of an earlier configuration is removed.
    let (min, low) = match qos_class(pod) {
        QosClass::Guaranteed => (protected, 0),
        QosClass::Burstable | QosClass::BestEffort => (0, protected),
    };
    (cgroup.memory_min, cgroup.memory_low) = (Some(min), Some(low));
    cgroup
}

/// Returns whether a container may use swap with `LimitedSwap`: its pod is Burstable and not critical, and
/// its memory request differs from its limit.
#[must_use]
pub fn may_swap(pod: &Pod, container: &Container) -> bool {
    let memory = |l: ResourceList| l.get(MEMORY).copied();
    qos_class(pod) == QosClass::Burstable
        && !pod::is_critical(pod)
        && memory(container_requests(container)) != memory(container_limits(container))
}

/// Node settings that apply to the cgroups of QoS classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QosTierSettings {
    /// `qosReserved` of memory, in percent; `None` without the feature gate.
    pub reserved_percent: Option<i64>,
    /// Memory of the machine without reservations, in bytes.
    pub allocatable_memory: i64,
    /// Whether requests are protected; `None` with cgroup v1.
    pub protects_memory: Option<bool>,
}

/// Values of the cgroups of QoS classes. `None` leaves a value unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QosTiers {
    /// cpu.shares of the Burstable cgroup.
    pub burstable_shares: u64,
    /// Limit of memory of the Burstable cgroup, in bytes.
    pub burstable_memory: Option<i64>,
    /// Limit of memory of the BestEffort cgroup, in bytes.
    pub best_effort_memory: Option<i64>,
    /// memory.min of the cgroup of all pods, in bytes.
    pub memory_min: Option<i64>,
    /// memory.low of the Burstable cgroup, in bytes.
    pub memory_low: Option<i64>,
}

/// Computes the values of the cgroups of QoS classes from the requests of the active pods
/// (`pkg/kubelet/cm: qosContainerManagerImpl.UpdateCgroups`).
#[must_use]
pub fn qos_tiers<'a>(active: impl IntoIterator<Item = &'a Pod>, settings: QosTierSettings) -> QosTiers {
    let mut milli = 0_i64;
    let mut guaranteed = 0_i64;
    let mut burstable = 0_i64;
    for pod in active {
        let requests = pod_requests(pod);
        let memory = requests.get(MEMORY).map_or(0, |q| q.value());
        match qos_class(pod) {
            QosClass::Guaranteed => guaranteed = guaranteed.saturating_add(memory),
            QosClass::Burstable => {
                burstable = burstable.saturating_add(memory);
                milli = milli.saturating_add(requests.get(CPU).map_or(0, |q| q.milli_value()));
            }
            QosClass::BestEffort => {}
        }
    }
    let mut tiers = QosTiers { burstable_shares: milli_to_shares(milli), ..QosTiers::default() };
    if let Some(percent) = settings.reserved_percent.filter(|_| settings.allocatable_memory > 0) {
        let part = |bytes: i64| {
            let part = i128::from(bytes).saturating_mul(i128::from(percent)) / 100;
            i64::try_from(part).unwrap_or(i64::MAX)
        };
        let left = settings.allocatable_memory.saturating_sub(part(guaranteed));
        let least = left.saturating_sub(part(burstable));
        // The kubelet does not write a limit of 0.
        (tiers.burstable_memory, tiers.best_effort_memory) =
            (Some(left).filter(|l| *l > 0), Some(least).filter(|l| *l > 0));
    }
    if let Some(protects) = settings.protects_memory {
        let low = if protects { burstable } else { 0 };
        // The parent's protection covers that of all its children.
        let min = if protects { guaranteed.saturating_add(burstable) } else { 0 };
        (tiers.memory_min, tiers.memory_low) = (Some(min), Some(low));
    }
    tiers
}

/// Returns `oom_score_adj` of a container (`pkg/kubelet/qos: GetContainerOOMScoreAdjust`). `node_memory` is
/// in bytes.
#[must_use]
pub fn oom_score_adj(pod: &Pod, container: &Container, node_memory: i64) -> i64 {
    let node_critical = pod::is_critical(pod)
        && pod::spec(pod).priority_class_name.as_deref() == Some("system-node-critical");
    if node_critical {
        return -997;
    }
    match qos_class(pod) {
        QosClass::Guaranteed => return -997,
        QosClass::BestEffort => return 1000,
        QosClass::Burstable => {}
    }
    let memory = |l: ResourceList| l.get(MEMORY).copied().unwrap_or_default().value();
    let spec = pod::spec(pod);
    let count = spec.containers.len().saturating_add(pod::init_containers(pod).len());
    let extra = match pod_resources(pod).and_then(|r| r.requests.as_ref()).and_then(|r| r.get(MEMORY)) {
        Some(own) if count > 0 => {
            let containers = memory(aggregate(pod, container_requests));
            let shared = Quantity::of(own).value().saturating_sub(containers);
            shared.checked_div(i64::try_from(count).unwrap_or(i64::MAX)).unwrap_or(0)
        }
        Some(_) | None => 0,
    };
    let score = |request: i64| {
        let scaled = i128::from(request.saturating_add(extra)).saturating_mul(1000);
        let share = scaled.checked_div(i128::from(node_memory.max(1))).and_then(|s| i64::try_from(s).ok());
        1000_i64.saturating_sub(share.unwrap_or(1000))
    };
    let mut adjust = score(memory(container_requests(container)));
    let sidecar = pod::init_containers(pod).iter().any(|c| c.name == container.name && pod::is_sidecar(c));
    if sidecar {
        // A sidecar must not be killed before the containers that it serves.
        let smallest = spec.containers.iter().map(|c| memory(container_requests(c))).min().unwrap_or(0);
        adjust = adjust.min(score(smallest));
    }
    if adjust < 3 {
        3
    } else if adjust >= 1000 {
        999
    } else {
        adjust
    }
}
