//! UIDs of static pods from files: those that Quintlet computes, and those of a kubelet that pods keep.
//!
//! The first complete read of the manifests decides ([`crate::adoption`]), for which the sandboxes of the runtime are listed. A file
//! in the root directory has the decision for each manifest, by its hash. So a restart decides alike after the file of a manifest was
//! touched, and a manifest that is as before again has its UID again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::Runtime;
use pod_sync_records::StateFile;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::error_chain;
use quintlet_model::ids::PodUid;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::adoption::{FileTimes, HashedContainer, StaticSandbox, adopted_uid};

/// Name of the file in the root directory. A kubelet ignores it.
const FILE: &str = "quintlet-static-pod-uids";
/// Version of the content. A file of another version is kept aside.
const VERSION: u32 = 1;
/// Longest wait for the runtime if a pod may be that of a kubelet. Without a runtime no pod starts either. Pods of the API server
/// are admitted meanwhile, after the limit of the manifests.
const UNDECIDED_WAIT: Duration = Duration::from_secs(30);
/// Longest wait for the runtime if the file has a UID for each pod. The pods of the API server wait for the manifests, see the
/// manifest gate of pod-sync, whose limit is longer.
const DECIDED_WAIT: Duration = Duration::from_secs(1);
/// Interval between attempts to list the sandboxes.
const RETRY: Duration = Duration::from_millis(500);

/// Lists the sandboxes of the runtime.
#[async_trait]
pub trait SandboxListing: Send + Sync {
    /// Returns the sandboxes of static pods from files, with their containers. The error is for the log.
    async fn static_sandboxes(&self) -> Result<Vec<StaticSandbox>, String>;
}

#[async_trait]
impl SandboxListing for Runtime {
    async fn static_sandboxes(&self) -> Result<Vec<StaticSandbox>, String> {
        let mut sandboxes = self.sandboxes(StaticSandbox::of).await.map_err(|e| error_chain(&e))?;
        let ids: BTreeSet<String> = sandboxes.iter().map(|sandbox| sandbox.id.clone()).collect();
        if ids.is_empty() {
            return Ok(sandboxes);
        }
        let of_static_pod = |container: quintlet_cri_api::v1::Container| {
            let hashed = HashedContainer::of(&container);
            ids.contains(&container.pod_sandbox_id).then_some((container.pod_sandbox_id, hashed))
        };
        let containers = self.containers(of_static_pod).await.map_err(|e| error_chain(&e))?;
        for (sandbox_id, container) in containers {
            if let Some(sandbox) = sandboxes.iter_mut().find(|sandbox| sandbox.id == sandbox_id) {
                sandbox.containers.push(container);
            }
        }
        Ok(sandboxes)
    }
}

/// Progress of the decision, which is made once.
#[derive(Debug)]
enum AdoptionPhase {
    /// The manifests were not read completely. The sandboxes are empty until they are listed.
    Deciding(Vec<StaticSandbox>),
    /// The first snapshot was delivered. Later manifests are new pods.
    Decided,
}

/// UIDs of static pods from files.
#[derive(Debug)]
pub struct StaticPodUids {
    /// Without it, for tests, nothing is kept.
    file: Option<StateFile>,
    /// UIDs by computed UID, as in the file.
    kept: BTreeMap<String, PodUid>,
    /// UIDs that the current read has given out before the decision, by computed UID.
    given: BTreeMap<String, PodUid>,
    phase: AdoptionPhase,
}

/// The file cannot be used.
#[derive(Debug, thiserror::Error)]
enum UidsFileError {
    #[error("not a file of UIDs")]
    Unreadable(#[source] serde_json::Error),
    #[error("unknown version {0}")]
    Version(u32),
}

#[derive(Serialize, Deserialize)]
struct UidsFile {
    version: u32,
    /// UIDs by computed UID.
    uids: BTreeMap<String, String>,
}

impl StaticPodUids {
    /// Reads the file in the root directory. Blocks.
    #[must_use]
    pub fn open(root_dir: &Path) -> Self {
        let (file, kept) = StateFile::open(root_dir.join(FILE), decode);
        let phase = AdoptionPhase::Deciding(Vec::new());
        Self { file: Some(file), kept, given: BTreeMap::new(), phase }
    }

    /// Returns UIDs without a file and without a kubelet before.
    #[must_use]
    pub fn computed() -> Self {
        Self { file: None, kept: BTreeMap::new(), given: BTreeMap::new(), phase: AdoptionPhase::Decided }
    }

    /// Returns whether the sandboxes of the runtime may still decide.
    #[must_use]
    pub fn is_deciding(&self) -> bool {
        matches!(self.phase, AdoptionPhase::Deciding(_))
    }

    /// Returns how long to wait for the sandboxes that decide on these pods, by their computed UIDs; `None` if there is no pod.
    #[must_use]
    pub fn sandbox_wait(&self, computed: &BTreeSet<String>) -> Option<Duration> {
        if computed.is_empty() {
            return None;
        }
        let is_decided = computed.iter().all(|uid| self.kept.contains_key(uid));
        Some(if is_decided { DECIDED_WAIT } else { UNDECIDED_WAIT })
    }

    /// Sets the sandboxes that decide.
    pub fn set_sandboxes(&mut self, listed: Vec<StaticSandbox>) {
        if let AdoptionPhase::Deciding(sandboxes) = &mut self.phase {
            *sandboxes = listed;
        }
    }

    /// Returns the UID that a pod keeps, if it is not the computed one.
    pub fn kept_uid(&mut self, pod: &Pod, computed: &str, times: FileTimes) -> Option<PodUid> {
        let AdoptionPhase::Deciding(sandboxes) = &self.phase else {
            return self.kept.get(computed).cloned();
        };
        let is_free =
            |uid: &PodUid| !self.given.iter().any(|(of_other, given)| of_other != computed && given == uid);
        let adopted = adopted_uid(pod, computed, times, sandboxes).filter(is_free);
        let uid = adopted.or_else(|| self.kept.get(computed).cloned());
        let given = uid.clone().or_else(|| PodUid::parse(computed).ok())?;
        let is_new = self.kept.get(computed) != Some(&given) && given.as_str() != computed;
        if is_new {
            let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
            tracing::info!(namespace, pod = name, pod.uid = %given, "keeping the UID of a static pod");
        }
        self.given.insert(computed.to_owned(), given);
        uid
    }

    /// Ends the decision once a snapshot of the manifests is complete, and writes it to the file. Blocks.
    ///
    /// With `is_whole`, each manifest was read, and UIDs of other manifests are dropped.
    pub fn decided(&mut self, is_whole: bool) {
        if !self.is_deciding() {
            return;
        }
        self.phase = AdoptionPhase::Decided;
        if is_whole {
            self.kept.clear();
        }
        self.kept.append(&mut self.given);
        let Some(file) = &mut self.file else { return };
        if self.kept.is_empty() && file.has(b"") {
            // Most nodes of a cluster have no static pod, and no file.
            return;
        }
        let written = encode(&self.kept).map_err(std::io::Error::from).and_then(|bytes| file.write(bytes));
        if let Err(error) = written {
            tracing::error!(%error, "failed to write the UIDs of static pods");
        }
    }
}

fn encode(kept: &BTreeMap<String, PodUid>) -> serde_json::Result<Vec<u8>> {
    let uids = kept.iter().map(|(computed, uid)| (computed.clone(), uid.to_string())).collect();
    serde_json::to_vec(&UidsFile { version: VERSION, uids })
}

fn decode(bytes: &[u8]) -> Result<BTreeMap<String, PodUid>, UidsFileError> {
    let file: UidsFile = serde_json::from_slice(bytes).map_err(UidsFileError::Unreadable)?;
    if file.version != VERSION {
        return Err(UidsFileError::Version(file.version));
    }
    let parsed = |(computed, uid): (String, String)| Some((computed, PodUid::parse(&uid).ok()?));
    Ok(file.uids.into_iter().filter_map(parsed).collect())
}

/// Lists the sandboxes, with repeats. Returns none if the runtime did not answer within `wait`.
pub async fn list_sandboxes(listing: &Arc<dyn SandboxListing>, wait: Duration) -> Vec<StaticSandbox> {
    let until = deadline_after(Instant::now(), wait);
    let mut last = String::from("no answer");
    loop {
        match tokio::time::timeout_at(until, listing.static_sandboxes()).await {
            Ok(Ok(sandboxes)) => return sandboxes,
            Ok(Err(error)) => last = error,
            Err(_) => {}
        }
        if deadline_after(Instant::now(), RETRY) >= until {
            tracing::warn!(error = last, "failed to list sandboxes, not keeping UIDs of a kubelet");
            return Vec::new();
        }
        tokio::time::sleep(RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    const BEFORE: FileTimes =
        FileTimes { modified: jiff::Timestamp::UNIX_EPOCH, changed: jiff::Timestamp::UNIX_EPOCH };
    const TOUCHED: FileTimes = FileTimes { modified: jiff::Timestamp::MAX, ..BEFORE };

    fn pod() -> Pod {
        serde_json::from_value(serde_json::json!({"metadata": {"name": "web-n", "namespace": "default"},
            "spec": {"containers": [{"name": "c", "image": "i"}]}}))
        .unwrap()
    }

    fn sandbox(uid: &str, created_unix_ns: i64) -> StaticSandbox {
        StaticSandbox {
            id: uid.to_owned(),
            uid: uid.to_owned(),
            name: "web-n".to_owned(),
            namespace: "default".to_owned(),
            created_unix_ns,
            config_hash: uid.to_owned(),
            seen: Some("2026-01-01T00:00:00Z".parse().unwrap()),
            containers: Vec::new(),
        }
    }

    // Decides on manifests with these computed UIDs, as at a start. Returns the UIDs that they keep.
    fn started(
        root: &Path,
        listed: &[StaticSandbox],
        computed: &[&str],
        times: FileTimes,
    ) -> (StaticPodUids, Vec<Option<String>>) {
        let mut uids = StaticPodUids::open(root);
        uids.set_sandboxes(listed.to_vec());
        let kept = computed.iter().map(|own| uids.kept_uid(&pod(), own, times).map(|uid| uid.to_string()));
        let kept = kept.collect();
        uids.decided(true);
        (uids, kept)
    }

    fn text(uid: &str) -> Option<String> {
        Some(uid.to_owned())
    }

    #[test]
    fn a_kept_uid_survives_restarts_and_a_touched_manifest() {
        let root = tempfile::tempdir().unwrap();
        let kubelets = [sandbox("k1", 1)];
        assert_eq!(started(root.path(), &kubelets, &["own"], TOUCHED).1, [None], "changed before the start");
        std::fs::remove_file(root.path().join(FILE)).unwrap();
        assert_eq!(started(root.path(), &kubelets, &["own"], BEFORE).1, [text("k1")]);
        for listed in [&kubelets[..], &[]] {
            assert_eq!(started(root.path(), listed, &["own"], TOUCHED).1, [text("k1")], "{listed:?}");
        }
        let (mut uids, kept) = started(root.path(), &[], &["own"], TOUCHED);
        assert_eq!(kept, [text("k1")]);
        let mut later = |own: &str| uids.kept_uid(&pod(), own, BEFORE).map(|uid| uid.to_string());
        assert_eq!(later("changed"), None, "a changed manifest is a new pod");
        assert_eq!(later("own"), text("k1"), "and the manifest as before is the pod as before");
    }

    #[test]
    fn a_newer_uid_of_a_kubelet_replaces_the_kept_one() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(started(root.path(), &[sandbox("k1", 1)], &["own"], BEFORE).1, [text("k1")]);
        let both = [sandbox("k1", 1), sandbox("k2", 2)];
        assert_eq!(started(root.path(), &both, &["own"], BEFORE).1, [text("k2")]);
        assert_eq!(started(root.path(), &[], &["own"], BEFORE).1, [text("k2")]);
    }

    #[test]
    fn the_uid_of_a_manifest_that_is_gone_is_dropped_unless_a_file_was_not_read() {
        let root = tempfile::tempdir().unwrap();
        let _ = started(root.path(), &[sandbox("k1", 1)], &["own"], BEFORE);
        let mut partial = StaticPodUids::open(root.path());
        partial.decided(false);
        assert_eq!(started(root.path(), &[], &["own"], BEFORE).1, [text("k1")]);
        assert_eq!(started(root.path(), &[], &["other"], BEFORE).1, [None]);
        assert_eq!(started(root.path(), &[], &["own"], BEFORE).1, [None]);
    }

    #[test]
    fn two_manifests_do_not_keep_the_same_uid() {
        let root = tempfile::tempdir().unwrap();
        let kept = started(root.path(), &[sandbox("k1", 1)], &["first", "second"], BEFORE).1;
        assert_eq!(kept, [text("k1"), None]);
    }

    #[test]
    fn the_wait_for_the_runtime_is_long_only_for_a_pod_that_is_not_known() {
        let root = tempfile::tempdir().unwrap();
        let wait = |uids: &StaticPodUids, computed: &[&str]| {
            uids.sandbox_wait(&computed.iter().map(|uid| (*uid).to_owned()).collect())
        };
        let new = StaticPodUids::open(root.path());
        assert_eq!((wait(&new, &[]), wait(&new, &["own"])), (None, Some(UNDECIDED_WAIT)));
        let _ = started(root.path(), &[], &["own"], BEFORE);
        let known = StaticPodUids::open(root.path());
        assert_eq!(wait(&known, &["own"]), Some(DECIDED_WAIT));
        assert_eq!(wait(&known, &["own", "new"]), Some(UNDECIDED_WAIT));
    }

    #[test]
    fn a_file_of_another_version_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(root.path().join(FILE), text).unwrap();
        write(r#"{"version":2,"uids":{"own":"k1"}}"#);
        assert_eq!(started(root.path(), &[], &["own"], BEFORE).1, [None]);
        write(r#"{"version":1,"uids":{"own":"k1","bad":"../etc"}}"#);
        assert_eq!(started(root.path(), &[], &["own", "bad"], BEFORE).1, [text("k1"), None]);
    }

    struct Failing {
        failures: Mutex<u32>,
    }

    #[async_trait]
    impl SandboxListing for Failing {
        async fn static_sandboxes(&self) -> Result<Vec<StaticSandbox>, String> {
            let mut failures = self.failures.lock();
            *failures = failures.saturating_sub(1);
            if *failures == 0 { Ok(vec![sandbox("k1", 1)]) } else { Err("no runtime".to_owned()) }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_sandboxes_are_listed_again_until_the_time_is_over() {
        let began = Instant::now();
        let after =
            |failures| Arc::new(Failing { failures: Mutex::new(failures) }) as Arc<dyn SandboxListing>;
        assert_eq!(list_sandboxes(&after(20), UNDECIDED_WAIT).await, [sandbox("k1", 1)]);
        assert!(began.elapsed() < UNDECIDED_WAIT);
        let began = Instant::now();
        assert_eq!(list_sandboxes(&after(u32::MAX), UNDECIDED_WAIT).await, []);
        assert!(began.elapsed() <= UNDECIDED_WAIT, "{:?}", began.elapsed());
    }
}
