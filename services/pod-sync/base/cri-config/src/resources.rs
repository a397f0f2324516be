//! Computes CRI resources of containers and sandboxes
//! (`pkg/kubelet/kuberuntime: generateLinuxContainerResources`).

use std::path::Path;

use k8s_openapi::api::core::v1::{Container, Pod};
use quintlet_cri_api::v1::{HugepageLimit, LinuxContainerResources};
use quintlet_model::pod;

use pod_sync_decisions::qos::{self, ResourceList};
use pod_sync_layout::NodeSettings;
use quintlet_model::quantity::Quantity;

/// The quota of containers that are not throttled.
const NO_QUOTA: i64 = -1;

/// The CPUs and NUMA nodes of a container, in the kernel's list format. Empty text leaves them to the
/// runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerPlacement {
    /// CPUs that the container may use.
    pub cpus: String,
    /// NUMA nodes of the container's memory.
    pub memory_nodes: String,
    /// No other container runs on the CPUs, so that a quota would only throttle this one.
    pub has_exclusive_cpus: bool,
}

fn linux(requests: &ResourceList, limits: &ResourceList, node: &NodeSettings) -> LinuxContainerResources {
    let milli = |l: &ResourceList| l.get("cpu").map(|q| q.milli_value());
    let limit = milli(limits);
    let shares = qos::milli_to_shares(milli(requests).or(limit).unwrap_or(0));
    let mut out = LinuxContainerResources {
        cpu_shares: i64::try_from(shares).unwrap_or(i64::MAX),
        memory_limit_in_bytes: limits.get("memory").map_or(0, |q| q.value()),
        ..LinuxContainerResources::default()
    };
    if node.cgroup.cfs_quota {
        out.cpu_period = i64::try_from(node.cgroup.period_us).unwrap_or(i64::MAX);
        out.cpu_quota = qos::milli_to_quota(limit.unwrap_or(0), node.cgroup.period_us);
    }
    if node.cgroup_v2 && !node.single_process_oom_kill {
        out.unified.insert("memory.oom.group".to_owned(), "1".to_owned());
    }
    out
}

/// Returns the resources of a container. A container without limits has those of the pod level.
#[must_use]
pub fn container_resources(
    pod: &Pod,
    container: &Container,
    node: &NodeSettings,
    placement: &ContainerPlacement,
) -> LinuxContainerResources {
    let mut limits = qos::container_limits(container);
    let requests = qos::container_requests(container);
    let pod_level: ResourceList = pod::spec(pod)
        .resources
        .as_ref()
        .and_then(|r| r.limits.as_ref())
        .into_iter()
        .flatten()
        .map(|(k, v)| (k.clone(), Quantity::of(v)))
        .collect();
    for (name, limit) in pod_level {
        limits.entry(name).or_insert(limit);
    }
    let mut out = linux(&requests, &limits, node);
    if node.cgroup.cfs_quota && placement.has_exclusive_cpus {
        out.cpu_quota = NO_QUOTA;
    }
    out.cpuset_cpus.clone_from(&placement.cpus);
    out.cpuset_mems.clone_from(&placement.memory_nodes);
    out.oom_score_adj = qos::oom_score_adj(pod, container, node.memory_bytes);
    out.hugepage_limits = hugepages(&limits, node);
    swap(pod, container, node, &mut out);
    memory_qos(pod, container, &limits, node, &mut out);
    out
}

/// Adds memory.min, memory.low and memory.high. A value that does not apply is written as its default, so
/// that a container of an earlier configuration loses it in a resize. `limits` includes those of the pod
/// level.
fn memory_qos(
    pod: &Pod,
    container: &Container,
    limits: &ResourceList,
    node: &NodeSettings,
    out: &mut LinuxContainerResources,
) {
    if !node.cgroup_v2 {
        return;
    }
    let memory = |l: &ResourceList| l.get("memory").map_or(0, |q| q.value());
    let request = memory(&qos::container_requests(container));
    let protected =
        if node.memory_qos.is_some_and(|settings| settings.protects_requests) { request } else { 0 };
    let is_guaranteed = qos::qos_class(pod) == qos::QosClass::Guaranteed;
    let (min, low) = if is_guaranteed { (protected, 0) } else { (0, protected) };
    let high =
        memory_high(request, memory(limits), node).map_or_else(|| "max".to_owned(), |high| high.to_string());
    for (file, value) in
        [("memory.min", min.to_string()), ("memory.low", low.to_string()), ("memory.high", high)]
    {
        out.unified.insert(file.to_owned(), value);
    }
}

/// Returns the memory in bytes above which a container is throttled; `None` if it is not throttled.
fn memory_high(request: i64, limit: i64, node: &NodeSettings) -> Option<i64> {
    let settings = node.memory_qos?;
    let factor = settings.throttling_factor?;
    if request == limit && request > 0 {
        return None;
    }
    let most = if limit == 0 { node.memory_without_reservations() } else { limit };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "below 2^53 bytes on every machine"
    )]
    let above_request = ((most.saturating_sub(request)) as f64 * factor) as i64;
    let page = settings.page_bytes.max(1);
    let high = request.saturating_add(above_request).checked_div(page).unwrap_or(0).saturating_mul(page);
    (most > 0 && high > request).then_some(high)
}

fn hugepages(limits: &ResourceList, node: &NodeSettings) -> Vec<HugepageLimit> {
    let limit_of = |size: u64| {
        limits.iter().find_map(|(name, amount)| {
            let page_size = Quantity::parse(name.strip_prefix("hugepages-")?).ok()?;
            (u64::try_from(page_size.value()) == Ok(size)).then(|| u64::try_from(amount.value()).unwrap_or(0))
        })
    };
    node.hugepage_sizes
        .iter()
        .map(|size| HugepageLimit {
            page_size: qos::page_size_name(*size),
            limit: limit_of(*size).unwrap_or(0),
        })
        .collect()
}

fn swap(pod: &Pod, container: &Container, node: &NodeSettings, out: &mut LinuxContainerResources) {
    if !node.swap_controller {
        return;
    }
    if !node.cgroup_v2 {
        out.memory_swap_limit_in_bytes = out.memory_limit_in_bytes;
        return;
    }
    let value = match node.limited_swap_bytes.filter(|_| qos::may_swap(pod, container)) {
        None => 0,
        Some(swap) => {
            let request = qos::container_requests(container).get("memory").map_or(0, |q| q.value());
            // A request that the machine cannot satisfy gets no swap.
            let request = if request > node.memory_bytes { 0 } else { request };
            let share = i128::from(request).saturating_mul(i128::from(swap));
            let share = share.checked_div(i128::from(node.memory_bytes.max(1)));
            share.and_then(|share| i64::try_from(share).ok()).unwrap_or(i64::MAX)
        }
    };
    out.unified.insert("memory.swap.max".to_owned(), value.to_string());
}

/// Returns the resources of all containers together, without overhead, for the sandbox. A pod in which a
/// container has exclusive CPUs has no quota.
#[must_use]
pub fn sandbox_resources(
    pod: &Pod,
    node: &NodeSettings,
    has_exclusive_cpus: bool,
) -> LinuxContainerResources {
    let limits = qos::pod_limits_without_overhead(pod);
    let mut out = linux(&qos::pod_requests_without_overhead(pod), &limits, node);
    if node.cgroup.cfs_quota && has_exclusive_cpus {
        out.cpu_quota = NO_QUOTA;
    }
    out
}

/// Returns the pod overhead as request and limit; empty without overhead.
#[must_use]
pub fn sandbox_overhead(pod: &Pod, node: &NodeSettings) -> LinuxContainerResources {
    let overhead: ResourceList =
        pod::spec(pod).overhead.iter().flatten().map(|(k, v)| (k.clone(), Quantity::of(v))).collect();
    if overhead.is_empty() {
        return LinuxContainerResources::default();
    }
    linux(&overhead, &overhead, node)
}

/// Returns the page sizes in bytes, ascending, from directories such as `hugepages-2048kB`.
#[must_use]
pub fn hugepage_sizes(dir: &Path) -> Vec<u64> {
    let mut sizes: Vec<u64> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|e| {
            let name = e.file_name();
            let kib: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            kib.checked_mul(1024)
        })
        .collect();
    sizes.sort_unstable();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;
    use pod_sync_layout::MemoryQos;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    fn of(pod_level: Value, resources: Value, node: &NodeSettings) -> LinuxContainerResources {
        let p =
            pod_of(json!({"containers": [{"name": "c", "resources": resources}], "resources": pod_level}));
        container_resources(&p, &p.spec.as_ref().unwrap().containers[0], node, &ContainerPlacement::default())
    }

    #[test]
    fn shares_quota_and_memory_follow_requests_and_limits() {
        let node = NodeSettings { memory_bytes: 4 << 30, ..NodeSettings::default() };
        for (name, pod_level, resources, want) in [
            ("nothing", json!({}), json!({}), (2, 0, 100_000, 0, 1000)),
            ("request", json!({}), json!({"requests": {"cpu": "250m"}}), (256, 0, 100_000, 0, 999)),
            ("limit only", json!({}), json!({"limits": {"cpu": "500m"}}), (512, 50_000, 100_000, 0, 999)),
            (
                "request of zero",
                json!({}),
                json!({"requests": {"cpu": "0"}, "limits": {"cpu": "500m"}}),
                (2, 50_000, 100_000, 0, 999),
            ),
            ("memory", json!({}), json!({"limits": {"memory": "64Mi"}}), (2, 0, 100_000, 64 << 20, 999)),
            (
                "pod level",
                json!({"limits": {"cpu": "1", "memory": "1Gi"}}),
                json!({}),
                (1024, 100_000, 100_000, 1 << 30, 999),
            ),
        ] {
            let r = of(pod_level, resources, &node);
            let got = (r.cpu_shares, r.cpu_quota, r.cpu_period, r.memory_limit_in_bytes, r.oom_score_adj);
            assert_eq!(got, want, "{name}");
            assert!(r.unified.is_empty());
        }
        let off =
            NodeSettings { cgroup: qos::CgroupSettings { cfs_quota: false, ..Default::default() }, ..node };
        let r = of(json!({}), json!({"limits": {"cpu": "1"}}), &off);
        assert_eq!((r.cpu_quota, r.cpu_period), (0, 0));
    }

    #[test]
    fn a_container_runs_on_its_cpus_and_exclusive_ones_have_no_quota() {
        let limits = json!({"limits": {"cpu": "2", "memory": "1Gi"}});
        let p = pod_of(json!({"containers": [{"name": "c", "resources": limits}]}));
        let resources = |cfs_quota, has_exclusive_cpus| {
            let cgroup = qos::CgroupSettings { cfs_quota, ..Default::default() };
            let node = NodeSettings { cgroup, ..NodeSettings::default() };
            let (cpus, memory_nodes) = ("1-2".to_owned(), "0".to_owned());
            let placement = ContainerPlacement { cpus, memory_nodes, has_exclusive_cpus };
            let r = container_resources(&p, &p.spec.as_ref().unwrap().containers[0], &node, &placement);
            let sandbox = sandbox_resources(&p, &node, has_exclusive_cpus);
            assert_eq!((r.cpuset_cpus.as_str(), r.cpuset_mems.as_str()), ("1-2", "0"));
            assert_eq!((r.cpu_quota, r.cpu_period), (sandbox.cpu_quota, sandbox.cpu_period));
            (r.cpu_quota, r.cpu_period)
        };
        assert_eq!(resources(true, false), (200_000, 100_000));
        assert_eq!(resources(true, true), (-1, 100_000));
        assert_eq!(resources(false, true), (0, 0));
    }

    #[test]
    fn every_page_size_of_the_node_is_listed() {
        let node = NodeSettings { hugepage_sizes: vec![2 << 20, 1 << 30], ..NodeSettings::default() };
        let r = of(json!({}), json!({"limits": {"hugepages-2Mi": "4Mi"}}), &node);
        let got: Vec<(&str, u64)> =
            r.hugepage_limits.iter().map(|h| (h.page_size.as_str(), h.limit)).collect();
        assert_eq!(got, [("2MB", 4 << 20), ("1GB", 0)]);
        assert_eq!(qos::page_size_name(64 << 10), "64KB");
    }

    #[test]
    fn huge_pages_of_the_pod_level_apply_to_containers_without_own_ones() {
        let node = NodeSettings { hugepage_sizes: vec![2 << 20, 1 << 30], ..NodeSettings::default() };
        for (pod_level, container, want) in [
            (json!({"hugepages-2Mi": "6Mi"}), json!({}), [6 << 20, 0]),
            (json!({"hugepages-2Mi": "6Mi"}), json!({"hugepages-2Mi": "4Mi"}), [4 << 20, 0]),
            (json!({"cpu": "1", "memory": "1Gi"}), json!({"hugepages-2Mi": "4Mi"}), [4 << 20, 0]),
            (json!({"hugepages-2Mi": "6Mi", "hugepages-1Gi": "1Gi"}), json!({}), [6 << 20, 1 << 30]),
            (json!({"hugepages-1Gi": "1Gi"}), json!({"hugepages-2Mi": "4Mi"}), [4 << 20, 1 << 30]),
        ] {
            let r = of(json!({"limits": pod_level}), json!({"limits": container}), &node);
            let got: Vec<u64> = r.hugepage_limits.iter().map(|h| h.limit).collect();
            assert_eq!(got, want, "{pod_level} {container}");
        }
    }

    #[test]
    fn the_unified_hierarchy_gets_group_kill_and_swap() {
        let v2 = NodeSettings {
            cgroup_v2: true,
            swap_controller: true,
            memory_bytes: 8 << 30,
            ..NodeSettings::default()
        };
        let resources = json!({"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}});
        let r = of(json!({}), resources.clone(), &v2);
        assert_eq!(r.unified["memory.oom.group"], "1");
        assert_eq!(r.unified["memory.swap.max"], "0");
        let limited = NodeSettings { limited_swap_bytes: Some(4 << 30), ..v2.clone() };
        assert_eq!(of(json!({}), resources, &limited).unified["memory.swap.max"], (512 << 20).to_string());
        for (request, want) in [("4Gi", 2 << 30), ("8Gi", 4_i64 << 30), ("9Gi", 0)] {
            let large = json!({"requests": {"memory": request}, "limits": {"memory": "16Gi"}});
            assert_eq!(
                of(json!({}), large, &limited).unified["memory.swap.max"],
                want.to_string(),
                "{request}"
            );
        }
        let equal = json!({"requests": {"memory": "1Gi", "cpu": "1"}, "limits": {"memory": "1Gi"}});
        assert_eq!(of(json!({}), equal, &limited).unified["memory.swap.max"], "0");
        let v1 = NodeSettings { cgroup_v2: false, ..v2 };
        let r = of(json!({}), json!({"limits": {"memory": "2Gi"}}), &v1);
        assert_eq!(r.memory_swap_limit_in_bytes, 2 << 30);
        assert!(r.unified.is_empty());
    }

    #[test]
    fn memory_qos_throttles_below_the_limit_and_protects_requests() {
        let plain = NodeSettings {
            cgroup_v2: true,
            single_process_oom_kill: true,
            memory_bytes: 10_000_000,
            reserved: [("memory".to_owned(), Quantity::parse("2000000").unwrap())].into(),
            ..NodeSettings::default()
        };
        let settings = MemoryQos { throttling_factor: Some(0.9), protects_requests: false, page_bytes: 4096 };
        let with = |memory_qos| NodeSettings { memory_qos: Some(memory_qos), ..plain.clone() };
        let throttled = with(settings);
        let tiered = with(MemoryQos { protects_requests: true, ..settings });
        let default = with(MemoryQos { throttling_factor: None, ..settings });
        let only_tiered = with(MemoryQos { throttling_factor: None, protects_requests: true, ..settings });
        let values = |node: &NodeSettings, pod_level: &Value, resources: &Value| {
            let unified = of(pod_level.clone(), resources.clone(), node).unified;
            let mut all: Vec<String> = unified.into_iter().map(|(file, v)| format!("{file}={v}")).collect();
            all.sort();
            all.join(" ")
        };
        let none = json!({});
        let burstable = json!({"requests": {"memory": "1000000"}, "limits": {"memory": "2000000"}});
        let unlimited = json!({"requests": {"memory": "1000000"}});
        let guaranteed = json!({"requests": {"memory": "1000000", "cpu": "1"}, "limits": {"memory": "1000000", "cpu": "1"}});
        let over = json!({"requests": {"memory": "9000000"}});
        let pod_limit = json!({"limits": {"memory": "3000000"}});
        // 1000000 + 0.9 * 1000000, and 1000000 + 0.9 * (8000000 - 1000000), in whole pages.
        let (limited, free) = (1_900_000 / 4096 * 4096, 7_300_000 / 4096 * 4096);
        let (of_all, of_pod) = (7_200_000 / 4096 * 4096, 2_800_000 / 4096 * 4096);
        let cleared = "memory.high=max memory.low=0 memory.min=0";
        for (name, node, pod_level, resources, want) in [
            ("the gate is off", &plain, &none, &burstable, cleared.to_owned()),
            ("no factor", &default, &none, &burstable, cleared.to_owned()),
            ("no factor, BestEffort", &default, &none, &none, cleared.to_owned()),
            (
                "limited",
                &throttled,
                &none,
                &burstable,
                format!("memory.high={limited} memory.low=0 memory.min=0"),
            ),
            (
                "unlimited",
                &throttled,
                &none,
                &unlimited,
                format!("memory.high={free} memory.low=0 memory.min=0"),
            ),
            (
                "limit of the pod",
                &throttled,
                &pod_limit,
                &unlimited,
                format!("memory.high={of_pod} memory.low=0 memory.min=0"),
            ),
            (
                "BestEffort",
                &throttled,
                &none,
                &none,
                format!("memory.high={of_all} memory.low=0 memory.min=0"),
            ),
            ("request equal to limit", &throttled, &none, &guaranteed, cleared.to_owned()),
            ("more than the machine has", &throttled, &none, &over, cleared.to_owned()),
            (
                "protected",
                &tiered,
                &none,
                &burstable,
                format!("memory.high={limited} memory.low=1000000 memory.min=0"),
            ),
            (
                "protected, Guaranteed",
                &tiered,
                &none,
                &guaranteed,
                "memory.high=max memory.low=0 memory.min=1000000".to_owned(),
            ),
            (
                "protected, no factor",
                &only_tiered,
                &none,
                &unlimited,
                "memory.high=max memory.low=1000000 memory.min=0".to_owned(),
            ),
        ] {
            assert_eq!(values(node, pod_level, resources), want, "{name}");
        }
        let v1 = NodeSettings { cgroup_v2: false, ..plain.clone() };
        assert_eq!(values(&v1, &none, &burstable), "");
    }

    #[test]
    fn the_sandbox_carries_the_sum_and_the_overhead_apart() {
        let p = pod_of(json!({"overhead": {"cpu": "100m", "memory": "10Mi"}, "containers": [
            {"name": "a", "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "1", "memory": "64Mi"}}},
            {"name": "b", "resources": {"requests": {"cpu": "500m"}}}]}));
        let node = NodeSettings::default();
        let r = sandbox_resources(&p, &node, false);
        assert_eq!((r.cpu_shares, r.cpu_quota, r.memory_limit_in_bytes), (1024, 100_000, 64 << 20));
        let o = sandbox_overhead(&p, &node);
        assert_eq!((o.cpu_shares, o.cpu_quota, o.memory_limit_in_bytes), (102, 10_000, 10 << 20));
    }
}
