//! Records that outlive the process, one per pod, each written before the action that it describes (docs/design/state.md).
//!
//! A record is a line with version, boot id and checksum, then JSON. One that is torn, foreign or of another boot is
//! dropped with a warning; it never stops anything.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_decisions::active::PodStart;
use pod_sync_decisions::backoff::{CrashLoopBackoffs, ImagePullBackoffs};
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::probes::ContainerStarts;
use pod_sync_decisions::status::KillOverride;
use pod_sync_decisions::worker::Termination as WorkerTermination;
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use serde::{Deserialize, Serialize};

/// Version of the record. A larger one on disk is from a later build and is dropped.
const SCHEMA: u32 = 1;

pub use pod_sync_decisions::worker::TerminationCause;

/// A termination that began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Termination {
    /// Why.
    pub cause: TerminationCause,
    /// Effective grace, seconds; it can only shrink.
    pub grace_seconds: i64,
    /// CLOCK_BOOTTIME at which the grace is over.
    pub deadline: Duration,
    /// CLOCK_BOOTTIME at which it began.
    pub since: Duration,
    /// CLOCK_BOOTTIME at which each container's stop began, preStop hook first, by container id: no hook is begun twice.
    #[serde(default)]
    pub stops: BTreeMap<String, Duration>,
    /// Containers have stopped; what is left is volumes, cgroup and status.
    #[serde(default)]
    pub stopped: bool,
    /// Nothing is left but the final status.
    #[serde(default)]
    pub finished: bool,
    /// What the status says, where the node killed it.
    #[serde(default)]
    pub killed_as: Option<KillOverride>,
}

impl Termination {
    /// The end that `termination` tells of, with what `before` knows of the stops.
    #[must_use]
    pub fn of(termination: &WorkerTermination, before: Option<&Self>) -> Self {
        Self {
            cause: termination.cause,
            grace_seconds: termination.grace_seconds,
            deadline: termination.deadline,
            since: termination.since,
            stops: before.map(|t| t.stops.clone()).unwrap_or_default(),
            stopped: termination.stopped,
            finished: termination.finished,
            killed_as: termination.killed_as.clone(),
        }
    }

    /// Without the stops.
    #[must_use]
    pub fn to_worker(&self) -> WorkerTermination {
        WorkerTermination {
            cause: self.cause,
            grace_seconds: self.grace_seconds,
            deadline: self.deadline,
            since: self.since,
            stopped: self.stopped,
            finished: self.finished,
            killed_as: self.killed_as.clone(),
        }
    }
}

/// Everything kept of one pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PodRecord {
    /// Last accepted pod.
    pub pod: Option<Arc<Pod>>,
    /// Last status made.
    pub status: Option<Arc<PodStatus>>,
    /// CLOCK_BOOTTIME at which the pod was accepted.
    #[serde(default)]
    pub accepted: Duration,
    /// When it started, as its status has it, once it has.
    #[serde(default)]
    pub active: Option<PodStart>,
    /// Probe memory by container and probe.
    #[serde(default)]
    pub probes: Vec<(String, ProbeType, ProbeMemory)>,
    /// When its containers started. On record before a probe target names them, so that a restart moves no initial delay.
    #[serde(default)]
    pub container_starts: ContainerStarts,
    /// Crash-loop back-off.
    #[serde(default)]
    pub crash_loop: CrashLoopBackoffs,
    /// Pull back-off.
    #[serde(default)]
    pub pulls: ImagePullBackoffs,
    /// Waiting reasons by container.
    #[serde(default)]
    pub waiting: BTreeMap<String, WaitingReason>,
    /// Termination, once it began.
    #[serde(default)]
    pub termination: Option<Termination>,
    /// It began to run: a static pod has its name from then on.
    #[serde(default)]
    pub started: bool,
    /// Its cgroup is being made: one that is there may not have its limits yet.
    #[serde(default)]
    pub limiting: bool,
    /// Containers whose start was asked for and not answered, by name: the instance's id.
    #[serde(default)]
    pub starting: BTreeMap<String, String>,
    /// postStart hooks that are owed to a container, by its id: CLOCK_BOOTTIME at which each began, none where it has not.
    #[serde(default)]
    pub post_starts: BTreeMap<String, Option<Duration>>,
    /// CLOCK_BOOTTIME at which stops of containers of a pod that does not end began, as in [`Termination::stops`].
    #[serde(default)]
    pub stops: BTreeMap<String, Duration>,
}

/// The directory of records.
#[derive(Debug, Clone)]
pub struct StateDir {
    dir: PathBuf,
    boot: String,
}

/// Why a record could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{path}: state cannot be written")]
pub struct StateError {
    path: PathBuf,
    source: std::io::Error,
}

impl StateDir {
    /// Uses `dir`, made if it is not there, with mode 0700.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(dir: &Path, boot: String) -> Result<Self, StateError> {
        let error = |source| StateError { path: dir.to_owned(), source };
        std::fs::create_dir_all(dir).map_err(error)?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(dir, mode).map_err(error)?;
        Ok(Self { dir: dir.to_owned(), boot })
    }

    fn path(&self, uid: &PodUid) -> PathBuf {
        self.dir.join(uid.as_str())
    }

    /// Writes a record in place of the last one.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn save(&self, uid: &PodUid, record: &PodRecord) -> Result<(), StateError> {
        let path = self.path(uid);
        let error = |source| StateError { path: path.clone(), source };
        let body = serde_json::to_vec(record).map_err(|e| error(e.into()))?;
        let mut bytes = format!("quintlet {SCHEMA} {} {:016x}\n", self.boot, checksum(&body)).into_bytes();
        bytes.extend_from_slice(&body);
        quintlet_kit::atomic_file::write(&path, &bytes, 0o600).map_err(error)
    }

    /// Forgets a pod.
    pub fn remove(&self, uid: &PodUid) {
        let path = self.path(uid);
        if let Err(e) = failpoint::file!("record removed", || std::fs::remove_file(&path))
            && e.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), error = %e, "state record not removed");
        }
    }

    /// Reads one record; none where there is none that can be used.
    #[must_use]
    pub fn read(&self, uid: &PodUid) -> Option<PodRecord> {
        self.parse(&std::fs::read(self.path(uid)).ok()?).ok()
    }

    /// Reads every record that can be used.
    #[must_use]
    pub fn load(&self) -> Vec<(PodUid, PodRecord)> {
        let Ok(entries) = std::fs::read_dir(&self.dir) else { return Vec::new() };
        let mut out = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(uid) = name.to_str().and_then(|n| PodUid::parse(n).ok()) else { continue };
            match std::fs::read(entry.path()).map_err(|e| e.to_string()).and_then(|bytes| self.parse(&bytes))
            {
                Ok(record) => out.push((uid, record)),
                Err(why) => {
                    tracing::warn!(pod.uid = %uid, why, "state record dropped");
                    let _ = std::fs::remove_file(entry.path());
                }
            }
        }
        out
    }

    fn parse(&self, bytes: &[u8]) -> Result<PodRecord, String> {
        let mut parts = bytes.splitn(2, |&b| b == b'\n');
        let header = parts.next().unwrap_or_default();
        let body = parts.next().ok_or("no header")?;
        let header = std::str::from_utf8(header).map_err(|_| "header is not text")?;
        let fields: Vec<&str> = header.split(' ').collect();
        let [magic, schema, boot, sum] = fields[..] else { return Err("header is torn".to_owned()) };
        if magic != "quintlet" || schema != SCHEMA.to_string() {
            return Err(format!("written by another version ({header})"));
        }
        if boot != self.boot {
            return Err("of another boot".to_owned());
        }
        if sum != format!("{:016x}", checksum(body)) {
            return Err("checksum does not match".to_owned());
        }
        serde_json::from_slice(body).map_err(|e| e.to_string())
    }
}

fn checksum(bytes: &[u8]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for b in bytes {
        hash ^= u64::from(*b);
        hash = hash.wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid() -> PodUid {
        PodUid::parse("u1").unwrap()
    }

    #[test]
    fn a_record_comes_back_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path(), "b1".into()).unwrap();
        let record = PodRecord {
            pod: Some(Arc::default()),
            waiting: [(
                "a".to_owned(),
                WaitingReason { reason: "CrashLoopBackOff".into(), message: "m".into() },
            )]
            .into(),
            ..PodRecord::default()
        };
        state.save(&uid(), &record).unwrap();
        assert_eq!(state.load(), [(uid(), record)]);
        state.remove(&uid());
        assert_eq!(state.load(), []);
    }

    #[test]
    fn a_torn_foreign_or_old_record_is_dropped_and_harms_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path(), "b1".into()).unwrap();
        state.save(&uid(), &PodRecord::default()).unwrap();
        let good = std::fs::read(dir.path().join("u1")).unwrap();
        for i in [0, 5, good.len() / 2, good.len() - 1] {
            std::fs::write(dir.path().join(format!("torn{i}")), &good[..i]).unwrap();
            let mut flipped = good.clone();
            flipped[i] ^= 1;
            std::fs::write(dir.path().join(format!("flipped{i}")), flipped).unwrap();
        }
        StateDir::open(dir.path(), "b2".into())
            .unwrap()
            .save(&PodUid::parse("old").unwrap(), &PodRecord::default())
            .unwrap();
        let left: Vec<_> = state.load().into_iter().map(|(uid, _)| uid).collect();
        assert_eq!(left, [uid()]);
    }
}
