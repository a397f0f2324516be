//! Plans how allocated resources are actuated: which containers change, and in which order with the pod's
//! cgroup.

use k8s_openapi::api::core::v1::{Container as SpecContainer, Pod, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use quintlet_model::ids::ContainerId;
use quintlet_model::pod;
use quintlet_model::runtime::{Container, ContainerState, PodRuntime};

use super::allocation::PodResources;
use super::volumes::{self, VolumeUpdate};
use crate::qos::{self, CgroupState, PodCgroup};
use crate::quantity::{Format, Quantity};

/// A resource that a resize can change, with the unit of its amounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Bytes.
    Memory,
    /// Millicores.
    Cpu,
}

impl Resource {
    /// Returns the name of the resource.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
        }
    }
}

/// `resizePolicy` of a container for a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizePolicy {
    /// The container keeps running.
    NotRequired,
    /// The container is restarted.
    RestartContainer,
}

/// Returns the resize policy of a container for a resource.
#[must_use]
pub fn resize_policy(container: &SpecContainer, resource: Resource) -> ResizePolicy {
    let policies = container.resize_policy.iter().flatten();
    match policies.filter(|p| p.resource_name == resource.as_str()).map(|p| p.restart_policy.as_str()).next()
    {
        Some("RestartContainer") => ResizePolicy::RestartContainer,
        Some(_) | None => ResizePolicy::NotRequired,
    }
}

/// Request and limit of one resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RequestAndLimit {
    /// Upper bound in millicores or bytes; `None` if there is none.
    pub limit: Option<i64>,
    /// Requested amount in millicores or bytes; `None` if the field is not set.
    pub request: Option<i64>,
}

impl RequestAndLimit {
    fn of(resources: Option<&ResourceRequirements>, resource: Resource) -> Self {
        let amount = |list: Option<&std::collections::BTreeMap<String, ApiQuantity>>| {
            let q = Quantity::of(list?.get(resource.as_str())?);
            Some(match resource {
                Resource::Memory => q.value(),
                Resource::Cpu => q.milli_value(),
            })
        };
        Self {
            limit: amount(resources.and_then(|r| r.limits.as_ref())),
            request: amount(resources.and_then(|r| r.requests.as_ref())),
        }
    }

    /// Reads the amounts as [`RequestAndLimit::of`], with the pod-level limit for a container without one.
    fn with_level(
        own: Option<&ResourceRequirements>,
        level: Option<&ResourceRequirements>,
        resource: Resource,
    ) -> Self {
        let own = Self::of(own, resource);
        Self { limit: own.limit.or(Self::of(level, resource).limit), ..own }
    }

    // The runtime does not distinguish zero from not set.
    fn differs(self, other: Self) -> bool {
        self.limit.unwrap_or(0) != other.limit.unwrap_or(0)
            || self.request.unwrap_or(0) != other.request.unwrap_or(0)
    }

    /// Compares the limits if they differ, the requests otherwise.
    fn is_less_than(self, other: Self) -> bool {
        let (own, others) = (self.limit.unwrap_or(0), other.limit.unwrap_or(0));
        if own == others { self.request.unwrap_or(0) < other.request.unwrap_or(0) } else { own < others }
    }

    /// Writes these amounts to a container's resources.
    pub fn write(self, resources: &mut ResourceRequirements, resource: Resource) {
        let quantity = |amount: i64| match resource {
            Resource::Memory => Quantity::from_units(amount, Format::Binary),
            Resource::Cpu => Quantity::from_milli(amount),
        };
        for (list, amount) in [(&mut resources.limits, self.limit), (&mut resources.requests, self.request)] {
            match amount {
                Some(amount) => {
                    let list = list.get_or_insert_default();
                    let slot = list.entry(resource.as_str().to_owned()).or_default();
                    // An equal amount keeps the spelling of the spec.
                    if Quantity::of(slot) != quantity(amount) || slot.0.is_empty() {
                        *slot = quantity(amount).to_api();
                    }
                }
                None => {
                    if let Some(list) = list.as_mut() {
                        list.remove(resource.as_str());
                    }
                }
            }
        }
    }
}

/// A running container whose resources change in place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerUpdate {
    /// The instance that is updated.
    pub id: ContainerId,
    /// Name in the spec.
    pub name: String,
    /// Amounts last sent to the runtime.
    pub from: RequestAndLimit,
    /// Allocated amounts.
    pub to: RequestAndLimit,
}

/// In-place changes of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ResizeActions {
    /// Containers whose memory changes, decreases first.
    pub memory: Vec<ContainerUpdate>,
    /// Containers whose CPU changes, decreases first.
    pub cpu: Vec<ContainerUpdate>,
    /// The pod's cgroup changes even if no container changes in place: a container restarts with new
    /// resources, or pod-level resources were resized.
    pub pod: bool,
    /// Memory-backed volumes whose size limit changes.
    pub volumes: Vec<VolumeUpdate>,
}

impl ResizeActions {
    /// Returns whether the running containers, the pod and its volumes have the allocated resources already.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty() && self.cpu.is_empty() && !self.pod && self.volumes.is_empty()
    }

    /// Returns the containers whose `resource` changes.
    #[must_use]
    pub fn of(&self, resource: Resource) -> &[ContainerUpdate] {
        match resource {
            Resource::Memory => &self.memory,
            Resource::Cpu => &self.cpu,
        }
    }

    fn add(&mut self, resource: Resource, update: ContainerUpdate) {
        let list = match resource {
            Resource::Memory => &mut self.memory,
            Resource::Cpu => &mut self.cpu,
        };
        // Decreases come first: increases of other containers may need the freed amount.
        if update.to.is_less_than(update.from) { list.insert(0, update) } else { list.push(update) }
    }
}

/// Effect of a resize on a running container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContainerChange {
    /// In place; its updates were added to the actions.
    InPlace,
    /// By a restart, as its policy requires.
    Restart,
}

fn changed(
    pod: &Pod,
    container: &SpecContainer,
    running: &Container,
    actuated: Option<&PodResources>,
) -> impl Iterator<Item = (Resource, RequestAndLimit, RequestAndLimit)> {
    let record = actuated.and_then(|a| a.containers.get(&container.name));
    let had = actuated.and_then(|a| a.pod_level.as_ref());
    let level = pod::spec(pod).resources.as_ref();
    [Resource::Memory, Resource::Cpu].into_iter().filter_map(move |resource| {
        let allocated = RequestAndLimit::with_level(container.resources.as_ref(), level, resource);
        let current = match record {
            Some(record) => RequestAndLimit::with_level(Some(record), had, resource),
            None => reported(running, resource, allocated),
        };
        allocated.differs(current).then_some((resource, current, allocated))
    })
}

/// Returns the amounts that the runtime reports, unless they are equal to `wanted` after the runtime's
/// rounding.
fn reported(running: &Container, resource: Resource, wanted: RequestAndLimit) -> RequestAndLimit {
    let Some(actual) = running.resources else { return wanted };
    match resource {
        Resource::Memory => match actual.memory_limit_bytes {
            0 => wanted,
            bytes => RequestAndLimit { limit: Some(bytes).filter(|b| *b > 0), ..wanted },
        },
        Resource::Cpu => {
            let quota = qos::quota_to_milli(actual.cpu_quota, actual.cpu_period);
            let shares = qos::milli_to_shares(wanted.request.or(wanted.limit).unwrap_or(0));
            let same_shares = actual.cpu_shares == 0 || u64::try_from(actual.cpu_shares) == Ok(shares);
            RequestAndLimit {
                limit: if quota == 0 { wanted.limit } else { Some(quota) },
                request: if same_shares {
                    wanted.request
                } else {
                    Some(qos::shares_to_milli(actual.cpu_shares))
                },
            }
        }
    }
}

/// Adds the in-place updates of a running container to the actions.
pub(crate) fn plan_container(
    pod: &Pod,
    container: &SpecContainer,
    running: &Container,
    actuated: Option<&PodResources>,
    actions: &mut ResizeActions,
) -> ContainerChange {
    let all: Vec<_> = changed(pod, container, running, actuated).collect();
    if all.iter().any(|(resource, ..)| resize_policy(container, *resource) == ResizePolicy::RestartContainer)
    {
        actions.pod = true;
        return ContainerChange::Restart;
    }
    for (resource, current, allocated) in all {
        let update = ContainerUpdate {
            id: running.id.clone(),
            name: container.name.clone(),
            from: current,
            to: allocated,
        };
        actions.add(resource, update);
    }
    ContainerChange::InPlace
}

/// Returns the resources to send to the runtime for a container and those to record as actuated. The former
/// have pod-level limits for a container without its own. Only one resource changes; the other keeps its
/// actuated amounts.
#[must_use]
pub fn actuated_resources(
    own: &SpecContainer,
    update: &ContainerUpdate,
    resource: Resource,
    actuated: Option<&PodResources>,
) -> (ResourceRequirements, ResourceRequirements) {
    let record = actuated.and_then(|a| a.containers.get(&own.name)).or(own.resources.as_ref());
    let mut kept = record.cloned().unwrap_or_default();
    RequestAndLimit::of(own.resources.as_ref(), resource).write(&mut kept, resource);
    let mut sent = kept.clone();
    let other = match resource {
        Resource::Memory => Resource::Cpu,
        Resource::Cpu => Resource::Memory,
    };
    if let Some(had) = actuated.and_then(|a| a.pod_level.as_ref()) {
        RequestAndLimit::with_level(Some(&kept), Some(had), other).write(&mut sent, other);
    }
    update.to.write(&mut sent, resource);
    (sent, kept)
}

/// Returns the pod-level resources to record as actuated once the pod's cgroup and its containers have the
/// new amounts of one resource.
#[must_use]
pub fn actuated_pod_level(
    had: Option<ResourceRequirements>,
    own: Option<&ResourceRequirements>,
    resource: Resource,
) -> ResourceRequirements {
    let mut has = had.unwrap_or_default();
    RequestAndLimit::of(own, resource).write(&mut has, resource);
    has
}

/// Returns whether pod-level CPU or memory differ from the actuated record. False without a record.
pub(crate) fn pod_level_changed(pod: &Pod, actuated: Option<&PodResources>) -> bool {
    let own = pod::spec(pod).resources.as_ref();
    actuated.is_some_and(|a| {
        [Resource::Memory, Resource::Cpu]
            .into_iter()
            .any(|r| RequestAndLimit::of(own, r).differs(RequestAndLimit::of(a.pod_level.as_ref(), r)))
    })
}

/// Returns whether allocated resources are not fully actuated.
#[must_use]
pub fn in_progress(pod: &Pod, runtime: &PodRuntime, actuated: Option<&PodResources>) -> bool {
    let spec = pod::spec(pod);
    let containers = pod::init_containers(pod).iter().chain(&spec.containers);
    pod_level_changed(pod, actuated)
        || !volumes::updates(pod, actuated).is_empty()
        || containers
            .filter_map(|c| Some((c, runtime.newest(&c.name)?)))
            .filter(|(_, running)| running.state == ContainerState::Running)
            .any(|(c, running)| changed(pod, c, running, actuated).next().is_some())
}

/// A step of actuating one resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeStep {
    /// Set the limit of the pod's cgroup.
    PodLimit,
    /// Set the request of the pod's cgroup: cpu.shares, or memory.min and memory.low.
    PodRequest,
    /// Update the containers, in their order.
    Containers,
}

/// Returns the steps for one resource: increases of the pod's cgroup before the containers, limit first,
/// decreases after them, limit last. Limits are never removed.
#[must_use]
pub fn resize_steps(resource: Resource, now: &CgroupState, wanted: &PodCgroup) -> Vec<ResizeStep> {
    let unlimited = |v: Option<i64>| v.filter(|v| *v >= 0).unwrap_or(i64::MAX);
    let shares = |shares: u64| i64::try_from(shares).unwrap_or(i64::MAX);
    let (limit, request) = match resource {
        Resource::Memory => {
            let protected = wanted.memory_min.max(wanted.memory_low);
            (
                wanted.memory_bytes.map(|w| (unlimited(now.memory_limit), unlimited(Some(w)))),
                now.memory_protected.zip(protected),
            )
        }
        Resource::Cpu => (
            wanted.cpu_quota_us.map(|w| (unlimited(now.cpu_quota_us), unlimited(Some(w)))),
            wanted.cpu_shares.map(|w| (shares(now.cpu_shares), shares(w))),
        ),
    };
    let before = [
        limit.filter(|(now, wanted)| wanted > now).map(|_| ResizeStep::PodLimit),
        request.filter(|(now, wanted)| wanted > now).map(|_| ResizeStep::PodRequest),
    ];
    let after = [
        request.filter(|(now, wanted)| wanted < now).map(|_| ResizeStep::PodRequest),
        limit.filter(|(now, wanted)| wanted < now).map(|_| ResizeStep::PodLimit),
    ];
    before.into_iter().flatten().chain([ResizeStep::Containers]).chain(after.into_iter().flatten()).collect()
}

/// Returns containers whose memory limit decreases, with the new limit. Their memory usage must be known.
pub fn memory_limit_decreases(updates: &[ContainerUpdate]) -> impl Iterator<Item = (&ContainerUpdate, i64)> {
    updates.iter().filter_map(|u| {
        let limit = u.to.limit.filter(|l| *l > 0)?;
        u.from.limit.filter(|l| *l > 0).is_none_or(|current| limit < current).then_some((u, limit))
    })
}

/// Returns why memory limits cannot decrease: usage exceeds them. `usage` returns the bytes that a container
/// uses, `None` if unknown.
#[must_use]
pub fn memory_decrease_error(
    now: &CgroupState,
    wanted: &PodCgroup,
    updates: &[ContainerUpdate],
    usage: impl Fn(&ContainerId) -> Option<i64>,
) -> Option<String> {
    let pod = wanted
        .memory_bytes
        .filter(|limit| now.memory_limit.is_none_or(|now| *limit < now) && now.memory_usage >= *limit);
    let pod = pod.map(|limit| {
        format!("attempting to set pod memory limit ({limit}) below current usage ({})", now.memory_usage)
    });
    let containers = memory_limit_decreases(updates).filter_map(|(update, limit)| {
        let used = usage(&update.id).filter(|used| *used >= limit)?;
        Some(format!(
            "attempting to set container {:?} memory limit ({limit}) below current usage ({used})",
            update.name
        ))
    });
    let all: Vec<String> = pod.into_iter().chain(containers).collect();
    match &all[..] {
        [] => None,
        [one] => Some(format!("cannot decrease memory limits: {one}")),
        more => Some(format!("cannot decrease memory limits: [{}]", more.join(", "))),
    }
}

#[cfg(test)]
mod tests;
