//! Converts wire types to the types of this crate and back. Errors name the path of the field.

use std::time::Duration;

use quintlet_proto::{pleg::v1 as pleg, probe::v1 as probe};

use crate::ids::{ContainerId, InvalidId, PodRef, PodUid, SandboxId};
use crate::probe::{ProbeMemory, ProbeResult, ProbeType};
use crate::runtime::{
    Container, ContainerState, Cursor, Mount, PodRuntime, Resources, Sandbox, SandboxState, User,
};

/// A message that cannot be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// A required field is missing.
    #[error("{0}: missing")]
    Missing(&'static str),
    /// A field has a value that this version does not know.
    #[error("{field}: unknown value {value}")]
    UnknownValue {
        /// Path of the field.
        field: &'static str,
        /// The value on the wire.
        value: i32,
    },
    /// An id is invalid.
    #[error("{field}")]
    Id {
        /// Path of the field.
        field: &'static str,
        /// The reason.
        source: InvalidId,
    },
    /// A field is not an IP address.
    #[error("{field}: {value:?} is not an IP address")]
    Address {
        /// Path of the field.
        field: &'static str,
        /// The text on the wire.
        value: String,
    },
}

fn id<T>(field: &'static str, parsed: Result<T, InvalidId>) -> Result<T, ConvertError> {
    parsed.map_err(|source| ConvertError::Id { field, source })
}

impl From<pleg::Cursor> for Cursor {
    fn from(c: pleg::Cursor) -> Self {
        Self { epoch: c.epoch, rev: c.rev }
    }
}

impl From<Cursor> for pleg::Cursor {
    fn from(c: Cursor) -> Self {
        Self { epoch: c.epoch, rev: c.rev }
    }
}

impl TryFrom<pleg::Sandbox> for Sandbox {
    type Error = ConvertError;
    fn try_from(s: pleg::Sandbox) -> Result<Self, ConvertError> {
        let state = match pleg::SandboxState::try_from(s.state) {
            Ok(pleg::SandboxState::Ready) => SandboxState::Ready,
            Ok(pleg::SandboxState::NotReady) => SandboxState::NotReady,
            Ok(pleg::SandboxState::Unspecified) | Err(_) => {
                return Err(ConvertError::UnknownValue { field: "sandbox.state", value: s.state });
            }
        };
        let ips = s
            .ips
            .into_iter()
            .map(|ip| ip.parse().map_err(|_| ConvertError::Address { field: "sandbox.ips", value: ip }))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            id: id("sandbox.id", SandboxId::parse(&s.id))?,
            attempt: s.attempt,
            state,
            created_unix_ns: s.created_unix_ns,
            ips,
            has_network: s.has_network,
            host_network: s.host_network,
            runtime_handler: s.runtime_handler,
            labels: s.labels.into_iter().collect(),
            annotations: s.annotations.into_iter().collect(),
        })
    }
}

impl From<&Sandbox> for pleg::Sandbox {
    fn from(s: &Sandbox) -> Self {
        Self {
            id: s.id.to_string(),
            attempt: s.attempt,
            state: match s.state {
                SandboxState::Ready => pleg::SandboxState::Ready,
                SandboxState::NotReady => pleg::SandboxState::NotReady,
            } as i32,
            created_unix_ns: s.created_unix_ns,
            ips: s.ips.iter().map(ToString::to_string).collect(),
            has_network: s.has_network,
            host_network: s.host_network,
            runtime_handler: s.runtime_handler.clone(),
            labels: s.labels.clone().into_iter().collect(),
            annotations: s.annotations.clone().into_iter().collect(),
        }
    }
}

impl TryFrom<pleg::Container> for Container {
    type Error = ConvertError;
    fn try_from(c: pleg::Container) -> Result<Self, ConvertError> {
        let state = match pleg::ContainerState::try_from(c.state) {
            Ok(pleg::ContainerState::Created) => ContainerState::Created,
            Ok(pleg::ContainerState::Running) => ContainerState::Running,
            Ok(pleg::ContainerState::Exited) => ContainerState::Exited,
            // A later version may add states; this version treats them as unknown.
            Ok(pleg::ContainerState::Unknown | pleg::ContainerState::Unspecified) | Err(_) => {
                ContainerState::Unknown
            }
        };
        Ok(Self {
            id: id("container.id", ContainerId::parse(&c.id))?,
            sandbox_id: id("container.sandbox_id", SandboxId::parse(&c.sandbox_id))?,
            name: c.name,
            attempt: c.attempt,
            state,
            created_unix_ns: c.created_unix_ns,
            started_unix_ns: c.started_unix_ns,
            finished_unix_ns: c.finished_unix_ns,
            exit_code: c.exit_code,
            reason: c.reason,
            message: c.message,
            image: c.image,
            image_ref: c.image_ref,
            image_id: c.image_id,
            log_path: c.log_path,
            labels: c.labels.into_iter().collect(),
            annotations: c.annotations.into_iter().collect(),
            mounts: c
                .mounts
                .into_iter()
                .map(|m| Mount {
                    container_path: m.container_path,
                    host_path: m.host_path,
                    readonly: m.readonly,
                })
                .collect(),
            resources: c.resources.map(|r| Resources {
                cpu_shares: r.cpu_shares,
                cpu_quota: r.cpu_quota,
                cpu_period: r.cpu_period,
                memory_limit_bytes: r.memory_limit_bytes,
            }),
            user: c.user.map(|u| User { uid: u.uid, gid: u.gid, supplemental_groups: u.supplemental_groups }),
            stop_signal: c.stop_signal,
        })
    }
}

impl From<&Container> for pleg::Container {
    fn from(c: &Container) -> Self {
        Self {
            id: c.id.to_string(),
            sandbox_id: c.sandbox_id.to_string(),
            name: c.name.clone(),
            attempt: c.attempt,
            state: match c.state {
                ContainerState::Created => pleg::ContainerState::Created,
                ContainerState::Running => pleg::ContainerState::Running,
                ContainerState::Exited => pleg::ContainerState::Exited,
                ContainerState::Unknown => pleg::ContainerState::Unknown,
            } as i32,
            created_unix_ns: c.created_unix_ns,
            started_unix_ns: c.started_unix_ns,
            finished_unix_ns: c.finished_unix_ns,
            exit_code: c.exit_code,
            reason: c.reason.clone(),
            message: c.message.clone(),
            image: c.image.clone(),
            image_ref: c.image_ref.clone(),
            image_id: c.image_id.clone(),
            log_path: c.log_path.clone(),
            labels: c.labels.clone().into_iter().collect(),
            annotations: c.annotations.clone().into_iter().collect(),
            mounts: c
                .mounts
                .iter()
                .map(|m| pleg::Mount {
                    container_path: m.container_path.clone(),
                    host_path: m.host_path.clone(),
                    readonly: m.readonly,
                })
                .collect(),
            resources: c.resources.map(|r| pleg::Resources {
                cpu_shares: r.cpu_shares,
                cpu_quota: r.cpu_quota,
                cpu_period: r.cpu_period,
                memory_limit_bytes: r.memory_limit_bytes,
            }),
            user: c.user.as_ref().map(|u| pleg::User {
                uid: u.uid,
                gid: u.gid,
                supplemental_groups: u.supplemental_groups.clone(),
            }),
            stop_signal: c.stop_signal.clone(),
        }
    }
}

/// Converts a pod record from a run of pleg-service with the epoch `epoch`.
///
/// # Errors
/// Fails if an id, a state or an address is invalid.
pub fn pod_runtime(record: pleg::PodRecord, epoch: u64) -> Result<PodRuntime, ConvertError> {
    let mut pod = PodRuntime {
        pod: PodRef {
            uid: id("pod.uid", PodUid::parse(&record.uid))?,
            namespace: record.namespace.into(),
            name: record.name.into(),
        },
        sandboxes: record.sandboxes.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
        containers: record.containers.into_iter().map(TryInto::try_into).collect::<Result<_, _>>()?,
        error: Some(record.error).filter(|e| !e.is_empty()),
        observed: Duration::from_nanos(record.observed_boottime_ns),
        cursor: Cursor { epoch, rev: record.rev },
    };
    pod.sort();
    Ok(pod)
}

impl From<&PodRuntime> for pleg::PodRecord {
    fn from(p: &PodRuntime) -> Self {
        Self {
            uid: p.pod.uid.to_string(),
            name: p.pod.name.to_string(),
            namespace: p.pod.namespace.to_string(),
            sandboxes: p.sandboxes.iter().map(Into::into).collect(),
            containers: p.containers.iter().map(Into::into).collect(),
            error: p.error.clone().unwrap_or_default(),
            observed_boottime_ns: u64::try_from(p.observed.as_nanos()).unwrap_or(u64::MAX),
            rev: p.cursor.rev,
        }
    }
}

/// Converts a probe type.
///
/// # Errors
/// Fails if the type is unspecified or unknown.
pub fn probe_type(value: i32) -> Result<ProbeType, ConvertError> {
    match probe::ProbeType::try_from(value) {
        Ok(probe::ProbeType::Startup) => Ok(ProbeType::Startup),
        Ok(probe::ProbeType::Readiness) => Ok(ProbeType::Readiness),
        Ok(probe::ProbeType::Liveness) => Ok(ProbeType::Liveness),
        Ok(probe::ProbeType::Unspecified) | Err(_) => {
            Err(ConvertError::UnknownValue { field: "probe.type", value })
        }
    }
}

impl From<ProbeType> for probe::ProbeType {
    fn from(t: ProbeType) -> Self {
        match t {
            ProbeType::Startup => Self::Startup,
            ProbeType::Readiness => Self::Readiness,
            ProbeType::Liveness => Self::Liveness,
        }
    }
}

/// Converts a probe result. Returns `None` for an unspecified result: there is none yet.
#[must_use]
pub fn probe_result(value: i32) -> Option<ProbeResult> {
    match probe::Outcome::try_from(value) {
        Ok(probe::Outcome::Unknown) => Some(ProbeResult::Unknown),
        Ok(probe::Outcome::Success) => Some(ProbeResult::Success),
        Ok(probe::Outcome::Failure) => Some(ProbeResult::Failure),
        Ok(probe::Outcome::Unspecified) | Err(_) => None,
    }
}

impl From<ProbeResult> for probe::Outcome {
    fn from(r: ProbeResult) -> Self {
        match r {
            ProbeResult::Unknown => Self::Unknown,
            ProbeResult::Success => Self::Success,
            ProbeResult::Failure => Self::Failure,
        }
    }
}

impl TryFrom<probe::Memory> for ProbeMemory {
    type Error = ConvertError;
    fn try_from(m: probe::Memory) -> Result<Self, ConvertError> {
        Ok(Self {
            container_id: id("memory.container_id", ContainerId::parse(&m.container_id))?,
            counter: m.counter,
            result: probe_result(m.result),
            last: probe_result(m.last).unwrap_or(ProbeResult::Unknown),
            run: m.run,
            on_hold: m.on_hold,
        })
    }
}

impl From<&ProbeMemory> for probe::Memory {
    fn from(m: &ProbeMemory) -> Self {
        Self {
            container_id: m.container_id.to_string(),
            counter: m.counter,
            result: m.result.map_or(probe::Outcome::Unspecified, Into::into) as i32,
            last: probe::Outcome::from(m.last) as i32,
            run: m.run,
            on_hold: m.on_hold,
        }
    }
}
