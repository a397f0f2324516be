//! Pod records: one file per pod, written before the action that it describes (docs/design/state.md).
//!
//! A record has four lines: version, boot ID and checksum (CRC-32); the pod, its status, and the rest as
//! JSON. The pod and the status are lines of their own since most records change neither, so that their JSON
//! is kept ([`RecordJson`]). A record that is damaged, of another version or of another boot is dropped with
//! a warning.
//!
//! Records are written and read on the threads of async tasks, as are the other small files below the run
//! directory: the ledger of containment, unsent events and the position in the kernel's log. That directory
//! is on a tmpfs, so no disk is waited for, and a write takes microseconds. A change is recorded before the
//! action that follows it, and a thread of its own would cost more than the write.

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
use pod_sync_decisions::worker::{Termination as WorkerTermination, TerminationCause, TerminationProgress};
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use serde::{Deserialize, Serialize};

/// Version of the format. Records of any other version are dropped.
const SCHEMA: u32 = 3;
/// Digits of the checksum.
pub(crate) const CHECKSUM_LENGTH: usize = 8;

/// A termination in progress.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Termination {
    /// Reason for which the pod ends.
    pub cause: TerminationCause,
    /// Effective grace period in seconds. It can only shrink.
    pub grace_seconds: i64,
    /// End of the grace period (CLOCK_BOOTTIME).
    pub deadline: Duration,
    /// Start of the termination (CLOCK_BOOTTIME).
    pub since: Duration,
    /// Start time (CLOCK_BOOTTIME) of each container's stop, which begins with the preStop hook, by container
    /// ID. A hook is never started twice.
    #[serde(default)]
    pub stops: BTreeMap<String, Duration>,
    /// All containers have stopped. Volumes, cgroup and status are left.
    #[serde(default)]
    pub stopped: bool,
    /// The claims are unprepared, so that they are not recovered once more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub claims_released: bool,
    /// Only the final status is left.
    #[serde(default)]
    pub finished: bool,
    /// Reason and message of the status, if the node killed the pod.
    #[serde(default)]
    pub killed_as: Option<KillOverride>,
}

impl Termination {
    /// Creates the record of `termination`, with the stops of the previous record.
    #[must_use]
    pub fn of(termination: &WorkerTermination, before: Option<&Self>) -> Self {
        Self {
            cause: termination.cause,
            grace_seconds: termination.grace_seconds,
            deadline: termination.deadline,
            since: termination.since,
            stops: before.map(|t| t.stops.clone()).unwrap_or_default(),
            stopped: termination.progress >= TerminationProgress::Stopped,
            claims_released: before.is_some_and(|t| t.claims_released),
            finished: termination.progress == TerminationProgress::Finished,
            killed_as: termination.killed_as.clone(),
        }
    }

    /// Returns the termination without the stops of containers.
    #[must_use]
    pub fn to_worker(&self) -> WorkerTermination {
        WorkerTermination {
            cause: self.cause,
            grace_seconds: self.grace_seconds,
            deadline: self.deadline,
            since: self.since,
            progress: match (self.stopped, self.finished) {
                (_, true) => TerminationProgress::Finished,
                (true, false) => TerminationProgress::Stopped,
                (false, false) => TerminationProgress::Stopping,
            },
            killed_as: self.killed_as.clone(),
        }
    }
}

/// The record of one pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct PodRecord {
    /// The last version of the pod that was accepted.
    #[serde(skip)]
    pub pod: Option<Arc<Pod>>,
    /// The last status that was computed.
    #[serde(skip)]
    pub status: Option<Arc<PodStatus>>,
    /// No status has been reported to the API server, since it has no object of the pod yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unreported: bool,
    /// Time at which the pod was accepted (CLOCK_BOOTTIME).
    #[serde(default)]
    pub accepted: Duration,
    /// W3C `traceparent` of the trace in which the pod was created, for links of later traces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub creation: Option<String>,
    /// Start of the pod, as in its status.
    #[serde(default)]
    pub active: Option<PodStart>,
    /// Results and streaks of probes, by container and type of probe.
    #[serde(default)]
    pub probes: Vec<(String, ProbeType, ProbeMemory)>,
    /// Start times of containers. Recorded before a probe target names them, so that initial delays survive a
    /// restart.
    #[serde(default)]
    pub container_starts: ContainerStarts,
    /// Restart delays of containers.
    #[serde(default)]
    pub crash_loop: CrashLoopBackoffs,
    /// Delays between pulls of images.
    #[serde(default)]
    pub pulls: ImagePullBackoffs,
    /// Reasons of containers that wait, by container, for the status.
    #[serde(default)]
    pub waiting: BTreeMap<String, WaitingReason>,
    /// The termination, once it was requested.
    #[serde(default)]
    pub termination: Option<Termination>,
    /// The pod has started to run. From then on a static pod holds its full name.
    #[serde(default)]
    pub started: bool,
    /// The cgroup is being created; an existing one may lack its limits.
    #[serde(default)]
    pub limiting: bool,
    /// IDs of containers whose StartContainer has no answer yet, by container name.
    #[serde(default)]
    pub starting: BTreeMap<String, String>,
    /// IDs of containers whose start the runtime refused, by container name, until another instance has
    /// started. They are not started again.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub refused_starts: BTreeMap<String, String>,
    /// postStart hooks that have not completed, by container ID, with their start time (CLOCK_BOOTTIME) if
    /// they have started.
    #[serde(default)]
    pub post_starts: BTreeMap<String, Option<Duration>>,
    /// Like [`Termination::stops`], for containers of a pod that does not terminate.
    #[serde(default)]
    pub stops: BTreeMap<String, Duration>,
}

impl PartialEq for PodRecord {
    fn eq(&self, other: &Self) -> bool {
        // Each record is compared with the one on disk, which mostly shares pod and status.
        fn same<T: PartialEq>(a: Option<&Arc<T>>, b: Option<&Arc<T>>) -> bool {
            match (a, b) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b) || a == b,
                (None, None) => true,
                (Some(_), None) | (None, Some(_)) => false,
            }
        }
        let Self {
            pod,
            status,
            unreported,
            accepted,
            creation,
            active,
            probes,
            container_starts,
            crash_loop,
            pulls,
            waiting,
            termination,
            started,
            limiting,
            starting,
            refused_starts,
            post_starts,
            stops,
        } = self;
        same(pod.as_ref(), other.pod.as_ref())
            && same(status.as_ref(), other.status.as_ref())
            && *unreported == other.unreported
            && *accepted == other.accepted
            && *creation == other.creation
            && *active == other.active
            && *probes == other.probes
            && *container_starts == other.container_starts
            && *crash_loop == other.crash_loop
            && *pulls == other.pulls
            && *waiting == other.waiting
            && *termination == other.termination
            && *started == other.started
            && *limiting == other.limiting
            && *starting == other.starting
            && *refused_starts == other.refused_starts
            && *post_starts == other.post_starts
            && *stops == other.stops
    }
}

/// The directory of pod records.
#[derive(Debug, Clone)]
pub struct StateDir {
    dir: PathBuf,
    boot: String,
}

/// A pod record was not written.
#[derive(Debug, thiserror::Error)]
#[error("failed to write {}", path.display())]
pub struct StateError {
    path: PathBuf,
    source: std::io::Error,
}

impl StateDir {
    /// Opens `dir`, which is created with mode 0700 if it does not exist.
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

    // Blocks: the state directory is on a tmpfs, see above.
    /// Replaces the record of a pod. `json` is kept for the next record of the same pod.
    pub fn save(&self, uid: &PodUid, record: &PodRecord, json: &mut RecordJson) -> Result<(), StateError> {
        let path = self.path(uid);
        let error = |source| StateError { path: path.clone(), source };
        let header = format!("quintlet {SCHEMA} {} ", self.boot);
        let pod = json.pod.of(record.pod.as_ref()).map_err(|e| error(e.into()))?;
        let status = json.status.of(record.status.as_ref()).map_err(|e| error(e.into()))?;
        // The rest is seldom larger than the pod.
        let length = header.len().saturating_add(pod.len().saturating_mul(2)).saturating_add(status.len());
        let mut bytes = Vec::with_capacity(length);
        bytes.extend_from_slice(header.as_bytes());
        let sum = bytes.len();
        bytes.extend_from_slice(&[b'0'; CHECKSUM_LENGTH]);
        bytes.push(b'\n');
        let body = bytes.len();
        for document in [pod, status] {
            bytes.extend_from_slice(document);
            bytes.push(b'\n');
        }
        serde_json::to_writer(&mut bytes, record).map_err(|e| error(e.into()))?;
        let digits = checksum(bytes.get(body..).unwrap_or_default());
        if let Some(place) = bytes.get_mut(sum..sum.saturating_add(CHECKSUM_LENGTH)) {
            place.copy_from_slice(digits.as_bytes());
        }
        quintlet_kit::atomic_file::write(&path, &bytes, 0o600).map_err(error)
    }

    // Blocks: the state directory is on a tmpfs, see above.
    /// Removes the record of a pod.
    pub fn remove(&self, uid: &PodUid) {
        let path = self.path(uid);
        if let Err(e) = failpoint::file!("record removed", || std::fs::remove_file(&path))
            && e.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), error = %e, "failed to remove pod record");
        }
    }

    // Blocks: the state directory is on a tmpfs, see above.
    /// Returns the record of a pod, or `None` if it is missing or unusable.
    #[must_use]
    pub fn read(&self, uid: &PodUid) -> Option<PodRecord> {
        self.parse(&std::fs::read(self.path(uid)).ok()?).ok()
    }

    /// Returns all usable records. Removes the others.
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
                Err(error) => {
                    tracing::warn!(pod.uid = %uid, error, "pod record is unusable, dropping");
                    let _ = std::fs::remove_file(entry.path());
                }
            }
        }
        out
    }

    fn parse(&self, bytes: &[u8]) -> Result<PodRecord, String> {
        let mut parts = bytes.splitn(2, |&b| b == b'\n');
        let header = parts.next().unwrap_or_default();
        let body = parts.next().ok_or("has no header")?;
        let header = std::str::from_utf8(header).map_err(|_| "header is not UTF-8")?;
        let fields: Vec<&str> = header.split(' ').collect();
        let [magic, schema, boot, sum] = fields[..] else { return Err("header is incomplete".to_owned()) };
        if magic != "quintlet" || schema != SCHEMA.to_string() {
            return Err(format!("written by another version ({header})"));
        }
        if boot != self.boot {
            return Err("written in another boot".to_owned());
        }
        if sum != checksum(body) {
            return Err("checksum does not match".to_owned());
        }
        // serde_json writes no line breaks, and escapes those in texts.
        let documents: Vec<&[u8]> = body.splitn(3, |&b| b == b'\n').collect();
        let [pod, status, rest] = documents[..] else { return Err("is incomplete".to_owned()) };
        let rest: PodRecord = serde_json::from_slice(rest).map_err(|e| e.to_string())?;
        let pod = serde_json::from_slice(pod).map_err(|e| e.to_string())?;
        let status = serde_json::from_slice(status).map_err(|e| e.to_string())?;
        Ok(PodRecord { pod, status, ..rest })
    }
}

/// JSON of the pod and of the status of a record, computed once for each version of them.
#[derive(Debug, Default)]
pub struct RecordJson {
    pod: KeptJson<Pod>,
    status: KeptJson<PodStatus>,
}

impl RecordJson {
    /// Returns the JSON of the status; `null` if there is none.
    ///
    /// # Errors
    /// Fails if the status has no JSON.
    pub fn status(&mut self, record: &PodRecord) -> serde_json::Result<&[u8]> {
        self.status.of(record.status.as_ref())
    }
}

#[derive(Debug)]
struct KeptJson<T>(Option<(Arc<T>, Box<[u8]>)>);

impl<T> Default for KeptJson<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: Serialize> KeptJson<T> {
    fn of(&mut self, value: Option<&Arc<T>>) -> serde_json::Result<&[u8]> {
        let Some(value) = value else { return Ok(b"null") };
        let kept = self.0.take().filter(|(written, _)| Arc::ptr_eq(written, value));
        let json = match kept {
            Some((_, json)) => json,
            None => serde_json::to_vec(value)?.into_boxed_slice(),
        };
        Ok(&self.0.insert((Arc::clone(value), json)).1)
    }
}

/// Returns the CRC-32 in [`CHECKSUM_LENGTH`] hexadecimal digits.
pub(crate) fn checksum(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid() -> PodUid {
        PodUid::parse("u1").unwrap()
    }

    #[test]
    fn a_record_is_restored_as_it_was_saved() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path(), "b1".into()).unwrap();
        let record = PodRecord {
            pod: Some(Arc::default()),
            creation: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned()),
            waiting: [(
                "a".to_owned(),
                WaitingReason { reason: "CrashLoopBackOff".into(), message: "m".into() },
            )]
            .into(),
            ..PodRecord::default()
        };
        state.save(&uid(), &record, &mut RecordJson::default()).unwrap();
        assert_eq!(state.load(), [(uid(), record)]);
        state.remove(&uid());
        assert_eq!(state.load(), []);
    }

    #[test]
    fn the_json_of_a_pod_and_of_its_status_is_kept_until_they_change() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path(), "b1".into()).unwrap();
        let mut json = RecordJson::default();
        let named = |name: &str| {
            let mut pod = Pod::default();
            pod.metadata.name = Some(name.to_owned());
            Some(Arc::new(pod))
        };
        let with =
            |phase: &str| Some(Arc::new(PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() }));
        let mut record = PodRecord::default();
        let (pod, status) = (named("line\nbreak"), with("two\nlines"));
        for (pod, status) in [
            (pod.clone(), status.clone()),
            (pod.clone(), status.clone()),
            (named("other"), status.clone()),
            (named("other"), with("other")),
            (None, status),
            (pod, None),
            (named("again"), with("again")),
        ] {
            (record.pod, record.status) = (pod, status);
            record.started = !record.started;
            state.save(&uid(), &record, &mut json).unwrap();
            assert_eq!(state.read(&uid()), Some(record.clone()));
        }
        let mut places = || {
            let pod = json.pod.of(record.pod.as_ref()).unwrap().as_ptr();
            (pod, json.status(&record).unwrap().as_ptr())
        };
        assert_eq!(places(), places(), "they are not converted again");
    }

    #[test]
    fn a_damaged_record_or_one_of_another_boot_is_dropped_and_others_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path(), "b1".into()).unwrap();
        state.save(&uid(), &PodRecord::default(), &mut RecordJson::default()).unwrap();
        let good = std::fs::read(dir.path().join("u1")).unwrap();
        for i in [0, 5, good.len() / 2, good.len() - 1] {
            std::fs::write(dir.path().join(format!("torn{i}")), &good[..i]).unwrap();
            let mut flipped = good.clone();
            flipped[i] ^= 1;
            std::fs::write(dir.path().join(format!("flipped{i}")), flipped).unwrap();
        }
        StateDir::open(dir.path(), "b2".into())
            .unwrap()
            .save(&PodUid::parse("old").unwrap(), &PodRecord::default(), &mut RecordJson::default())
            .unwrap();
        let left: Vec<_> = state.load().into_iter().map(|(uid, _)| uid).collect();
        assert_eq!(left, [uid()]);
    }
}
