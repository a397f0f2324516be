//! UIDs of static pods from files: computed ones, and those of sandboxes that pods keep.
//!
//! The first complete read of the manifests decides ([`crate::adoption`]), for which the sandboxes of the
//! runtime are listed. A file in the root directory has the decision for each manifest, by the UID that
//! former versions computed for it, so that they can read it. So a restart decides alike after the file of a
//! manifest was touched, and a manifest that is as before again has its UID again.
//!
//! Pods in the records of an earlier run keep their UID without the runtime. If it does not answer, the
//! others are new pods, and the file does not have them: the next start decides on them.
//!
//! New pods get the UID of the kubelet that ran on the node before, as far as sandboxes show its version, or
//! else of the newest one.

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

use crate::adoption::{FileTimes, HashedContainer, StaticSandbox, adopted_uid, made_uid, version_of_kubelet};
use crate::kubelet_uid::{ComputedUids, KubeletVersion};

/// Name of the file in the root directory. A kubelet ignores it.
const FILE: &str = "quintlet-static-pod-uids";
/// Version of the content. A file of another version is kept aside.
const VERSION: u32 = 1;
/// Longest wait for the runtime if a pod may be that of a kubelet. Without a runtime no pod starts either.
/// Pods of the API server are admitted meanwhile, after the limit of the manifests.
pub(crate) const UNDECIDED_WAIT: Duration = Duration::from_secs(30);
/// Longest wait for the runtime if the file has a UID for each pod. The pods of the API server wait for the
/// manifests, see the manifest gate of pod-sync, whose limit is longer.
const DECIDED_WAIT: Duration = Duration::from_secs(1);
/// Interval between attempts to list the sandboxes.
const RETRY: Duration = Duration::from_millis(500);

/// Lists the sandboxes of the runtime.
#[async_trait]
pub trait SandboxListing: Send + Sync {
    /// Returns the sandboxes of static pods from a source, as its annotation names it, with their containers.
    /// The error is for the log.
    async fn static_sandboxes(&self, source: &str) -> Result<Vec<StaticSandbox>, String>;
}

#[async_trait]
impl SandboxListing for Runtime {
    async fn static_sandboxes(&self, source: &str) -> Result<Vec<StaticSandbox>, String> {
        let of_source = |sandbox| StaticSandbox::of(sandbox, source);
        let mut sandboxes = self.sandboxes(of_source).await.map_err(|e| error_chain(&e))?;
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
    /// The manifests were not read completely. There are no sandboxes until they are listed.
    Deciding(Option<Vec<StaticSandbox>>),
    /// The first snapshot was delivered. Later manifests are new pods.
    Decided,
}

/// UIDs of static pods from files.
#[derive(Debug)]
pub struct StaticPodUids {
    /// Without it, for tests, nothing is kept.
    file: Option<StateFile>,
    known: KnownUids,
    /// Pods of files in the records of an earlier run.
    recorded: Vec<StaticSandbox>,
    /// UIDs that the current read has given out before the decision, by the former UID.
    given: BTreeMap<String, PodUid>,
    /// Former UIDs of manifests on which the sandboxes would have decided.
    undecided: BTreeSet<String>,
    phase: AdoptionPhase,
}

/// Content of the file.
#[derive(Debug, Default)]
struct KnownUids {
    /// UIDs by a computed UID, as they are written by the former one.
    kept: BTreeMap<String, PodUid>,
    /// Version of the kubelet whose UIDs new pods get, if a sandbox has shown one. Sandboxes of Quintlet show
    /// it, too.
    kubelet: Option<KubeletVersion>,
}

impl KnownUids {
    fn kept(&self, computed: &ComputedUids) -> Option<&PodUid> {
        computed.all().find_map(|uid| self.kept.get(uid))
    }

    /// Returns the UID of a pod for which nothing decides.
    fn of_new(&self, computed: &ComputedUids) -> Option<PodUid> {
        PodUid::parse(computed.of_kubelet(self.kubelet.unwrap_or(KubeletVersion::NEWEST))).ok()
    }
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
    /// UIDs by former UID. Some versions have written them by the UID of the newest kubelet.
    uids: BTreeMap<String, String>,
    /// Minor version of the kubelet whose UIDs new pods get.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kubelet: Option<String>,
}

impl StaticPodUids {
    /// Reads the file in the root directory. `recorded` are the pods of files in the records of an earlier
    /// run. Blocks.
    #[must_use]
    pub fn open(root_dir: &Path, recorded: Vec<StaticSandbox>) -> Self {
        let (file, known) = StateFile::open(root_dir.join(FILE), decode);
        Self {
            file: Some(file),
            known,
            recorded,
            given: BTreeMap::new(),
            undecided: BTreeSet::new(),
            phase: AdoptionPhase::Deciding(None),
        }
    }

    /// Returns UIDs without a file and without a kubelet before.
    #[must_use]
    pub fn computed() -> Self {
        Self {
            file: None,
            known: KnownUids::default(),
            recorded: Vec::new(),
            given: BTreeMap::new(),
            undecided: BTreeSet::new(),
            phase: AdoptionPhase::Decided,
        }
    }

    /// Returns whether the sandboxes of the runtime may still decide.
    #[must_use]
    pub fn is_deciding(&self) -> bool {
        matches!(self.phase, AdoptionPhase::Deciding(_))
    }

    /// Returns how long to wait for the sandboxes that decide on these pods; `None` if there is no pod.
    #[must_use]
    pub fn sandbox_wait(&self, pods: &[(Pod, ComputedUids)]) -> Option<Duration> {
        if pods.is_empty() {
            return None;
        }
        let is_decided = pods.iter().all(|(_, computed)| self.known.kept(computed).is_some());
        Some(if is_decided { DECIDED_WAIT } else { UNDECIDED_WAIT })
    }

    /// Sets the sandboxes that decide, or `None` if they cannot be listed. Those of the pods show the version
    /// of the kubelet.
    pub fn set_sandboxes(&mut self, listed: Option<Vec<StaticSandbox>>, pods: &[(Pod, ComputedUids)]) {
        let AdoptionPhase::Deciding(sandboxes) = &mut self.phase else { return };
        let shown = version_of_kubelet(pods, listed.as_deref().unwrap_or_default());
        let recorded = || version_of_kubelet(pods, &self.recorded);
        self.known.kubelet = shown.or(self.known.kubelet).or_else(recorded);
        *sandboxes = listed;
    }

    /// Returns the UID of a pod, unless it is that of the newest kubelet.
    pub fn kept_uid(&mut self, pod: &Pod, computed: &ComputedUids, times: FileTimes) -> Option<PodUid> {
        let kept = self.known.kept(computed).cloned();
        let AdoptionPhase::Deciding(sandboxes) = &self.phase else {
            return kept.or_else(|| self.known.of_new(computed));
        };
        let is_free = |uid: &PodUid| {
            !self.given.iter().any(|(of_other, given)| of_other != computed.former() && given == uid)
        };
        let listed = sandboxes.as_deref().unwrap_or_default();
        let adopted = adopted_uid(pod, computed, times, listed).filter(is_free);
        let recorded = || made_uid(pod, computed, &self.recorded).filter(is_free);
        let decided = adopted.or_else(|| kept.clone()).or_else(recorded);
        if decided.is_none() && sandboxes.is_none() {
            self.undecided.insert(computed.former().to_owned());
        }
        let given = decided.or_else(|| self.known.of_new(computed))?;
        if kept.as_ref() != Some(&given) && computed.version_of(given.as_str()).is_none() {
            let (namespace, name) = (pod.metadata.namespace.as_deref(), pod.metadata.name.as_deref());
            tracing::info!(namespace, pod = name, pod.uid = %given, "keeping the UID of a static pod");
        }
        self.given.insert(computed.former().to_owned(), given.clone());
        Some(given)
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
            self.known.kept.clear();
        }
        let undecided = std::mem::take(&mut self.undecided);
        self.given.retain(|former, _| !undecided.contains(former));
        self.known.kept.append(&mut self.given);
        let Some(file) = &mut self.file else { return };
        if self.known.kept.is_empty() && file.has(b"") {
            // Most nodes of a cluster have no static pod, and no file.
            return;
        }
        let written = encode(&self.known).map_err(std::io::Error::from).and_then(|bytes| file.write(bytes));
        if let Err(error) = written {
            tracing::error!(%error, "failed to write the UIDs of static pods");
        }
    }
}

fn encode(known: &KnownUids) -> serde_json::Result<Vec<u8>> {
    let uids = known.kept.iter().map(|(computed, uid)| (computed.clone(), uid.to_string())).collect();
    let kubelet = known.kubelet.map(|version| version.name().to_owned());
    serde_json::to_vec(&UidsFile { version: VERSION, uids, kubelet })
}

fn decode(bytes: &[u8]) -> Result<KnownUids, UidsFileError> {
    let file: UidsFile = serde_json::from_slice(bytes).map_err(UidsFileError::Unreadable)?;
    if file.version != VERSION {
        return Err(UidsFileError::Version(file.version));
    }
    let parsed = |(computed, uid): (String, String)| Some((computed, PodUid::parse(&uid).ok()?));
    Ok(KnownUids {
        kept: file.uids.into_iter().filter_map(parsed).collect(),
        kubelet: file.kubelet.as_deref().and_then(KubeletVersion::parse),
    })
}

/// Lists the sandboxes of a source, with repeats. Returns `None` if the runtime did not answer within `wait`.
pub async fn list_sandboxes(
    listing: &Arc<dyn SandboxListing>,
    source: &str,
    wait: Duration,
) -> Option<Vec<StaticSandbox>> {
    let until = deadline_after(Instant::now(), wait);
    let mut last = String::from("no answer");
    loop {
        match tokio::time::timeout_at(until, listing.static_sandboxes(source)).await {
            Ok(Ok(sandboxes)) => return Some(sandboxes),
            Ok(Err(error)) => last = error,
            Err(_) => {}
        }
        if deadline_after(Instant::now(), RETRY) >= until {
            tracing::warn!(error = last, "failed to list sandboxes, not keeping their UIDs");
            return None;
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

    // Returns the UIDs of a manifest whose UID of the newest kubelet this is.
    fn uids_of(newest: &str) -> ComputedUids {
        let other = |version: &str| format!("{newest}-{version}");
        ComputedUids::of_test([&other("1.35"), &other("1.36"), newest], &other("former"))
    }

    // Decides on manifests with these UIDs of the newest kubelet, as at a start. Returns the UIDs that the
    // pods get.
    fn started(
        root: &Path,
        listed: &[StaticSandbox],
        computed: &[&str],
        times: FileTimes,
    ) -> (StaticPodUids, Vec<Option<String>>) {
        started_with(StaticPodUids::open(root, Vec::new()), Some(listed), computed, times)
    }

    fn started_with(
        mut uids: StaticPodUids,
        listed: Option<&[StaticSandbox]>,
        computed: &[&str],
        times: FileTimes,
    ) -> (StaticPodUids, Vec<Option<String>>) {
        let pods: Vec<_> = computed.iter().map(|newest| (pod(), uids_of(newest))).collect();
        uids.set_sandboxes(listed.map(<[_]>::to_vec), &pods);
        let kept =
            pods.iter().map(|(pod, computed)| uids.kept_uid(pod, computed, times).map(|uid| uid.to_string()));
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
        assert_eq!(
            started(root.path(), &kubelets, &["own"], TOUCHED).1,
            [text("own")],
            "changed before the start"
        );
        std::fs::remove_file(root.path().join(FILE)).unwrap();
        assert_eq!(started(root.path(), &kubelets, &["own"], BEFORE).1, [text("k1")]);
        for listed in [&kubelets[..], &[]] {
            assert_eq!(started(root.path(), listed, &["own"], TOUCHED).1, [text("k1")], "{listed:?}");
        }
        let (mut uids, kept) = started(root.path(), &[], &["own"], TOUCHED);
        assert_eq!(kept, [text("k1")]);
        let mut later =
            |newest: &str| uids.kept_uid(&pod(), &uids_of(newest), BEFORE).map(|uid| uid.to_string());
        assert_eq!(later("changed"), text("changed"), "a changed manifest is a new pod");
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
        let mut partial = StaticPodUids::open(root.path(), Vec::new());
        partial.decided(false);
        assert_eq!(started(root.path(), &[], &["own"], BEFORE).1, [text("k1")]);
        assert_eq!(started(root.path(), &[], &["other"], BEFORE).1, [text("other")]);
        assert_eq!(started(root.path(), &[], &["own"], BEFORE).1, [text("own")]);
    }

    #[test]
    fn a_pod_of_a_former_version_keeps_its_uid_at_an_upgrade() {
        let root = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(root.path().join(FILE), text).unwrap();
        // As a former version leaves it, for its own pod and for one of a kubelet.
        write(r#"{"version":1,"uids":{"a-former":"a-former","b-former":"k1"}}"#);
        let manifests = ["a", "b"];
        let kept = [text("a-former"), text("k1")];
        for listed in [&[sandbox("a-former", 1)][..], &[]] {
            assert_eq!(started(root.path(), listed, &manifests, TOUCHED).1, kept, "{listed:?}");
        }
        // Without the file, the sandbox has the UID.
        std::fs::remove_file(root.path().join(FILE)).unwrap();
        assert_eq!(started(root.path(), &[sandbox("a-former", 1)], &["a"], TOUCHED).1, [text("a-former")]);
    }

    #[test]
    fn a_former_version_reads_the_file_and_each_computed_uid_finds_an_entry() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join(FILE);
        let _ = started(root.path(), &[sandbox("k1", 1)], &["a"], BEFORE);
        let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(written, serde_json::json!({"version": 1, "uids": {"a-former": "k1"}}));
        for key in ["a-former", "a", "a-1.36", "a-1.35"] {
            std::fs::write(&path, format!(r#"{{"version":1,"uids":{{"{key}":"k1"}}}}"#)).unwrap();
            assert_eq!(started(root.path(), &[], &["a"], TOUCHED).1, [text("k1")], "{key}");
        }
    }

    #[test]
    fn without_an_answer_of_the_runtime_records_decide_and_other_pods_stay_undecided() {
        let root = tempfile::tempdir().unwrap();
        let open = || StaticPodUids::open(root.path(), vec![sandbox("a-former", 1), sandbox("b-1.36", 2)]);
        let manifests = ["a", "b", "c"];
        let (mut uids, kept) = started_with(open(), None, &manifests, TOUCHED);
        assert_eq!(kept, [text("a-former"), text("b-1.36"), text("c-1.36")]);
        for (newest, want) in [("a", "a-former"), ("b", "b-1.36"), ("c", "c-1.36")] {
            let later = uids.kept_uid(&pod(), &uids_of(newest), TOUCHED).map(|uid| uid.to_string());
            assert_eq!(later, text(want), "later reads give the same UID");
        }
        let written: serde_json::Value =
            serde_json::from_slice(&std::fs::read(root.path().join(FILE)).unwrap()).unwrap();
        assert_eq!(written["uids"], serde_json::json!({"a-former": "a-former", "b-former": "b-1.36"}));
        let listed = [sandbox("c-1.35", 1)];
        let kept = started_with(open(), Some(&listed), &manifests, TOUCHED).1;
        assert_eq!(kept, [text("a-former"), text("b-1.36"), text("c-1.35")], "the next start decides");
    }

    #[test]
    fn new_pods_get_the_uid_of_the_kubelet_that_made_the_others() {
        let root = tempfile::tempdir().unwrap();
        let made = [sandbox("old-1.36", 1)];
        let (mut uids, kept) = started(root.path(), &made, &["new", "old"], TOUCHED);
        assert_eq!(kept, [text("new-1.36"), text("old-1.36")]);
        let later = uids.kept_uid(&pod(), &uids_of("later"), TOUCHED).map(|uid| uid.to_string());
        assert_eq!(later, text("later-1.36"));
        // Without sandboxes, the file has the version.
        assert_eq!(started(root.path(), &[], &["newer"], TOUCHED).1, [text("newer-1.36")]);
        let newest = [sandbox("newer", 3), sandbox("newer-1.36", 2)];
        assert_eq!(
            started(root.path(), &newest, &["newer", "last"], TOUCHED).1,
            [text("newer"), text("last")]
        );
    }

    #[test]
    fn two_manifests_do_not_keep_the_same_uid() {
        let root = tempfile::tempdir().unwrap();
        let kept = started(root.path(), &[sandbox("k1", 1)], &["first", "second"], BEFORE).1;
        assert_eq!(kept, [text("k1"), text("second")]);
    }

    #[test]
    fn the_wait_for_the_runtime_is_long_only_for_a_pod_that_is_not_known() {
        let root = tempfile::tempdir().unwrap();
        let wait = |uids: &StaticPodUids, computed: &[&str]| {
            let pods: Vec<_> = computed.iter().map(|newest| (pod(), uids_of(newest))).collect();
            uids.sandbox_wait(&pods)
        };
        let new = StaticPodUids::open(root.path(), Vec::new());
        assert_eq!((wait(&new, &[]), wait(&new, &["own"])), (None, Some(UNDECIDED_WAIT)));
        let _ = started(root.path(), &[], &["own"], BEFORE);
        let known = StaticPodUids::open(root.path(), Vec::new());
        assert_eq!(wait(&known, &["own"]), Some(DECIDED_WAIT));
        assert_eq!(wait(&known, &["own", "new"]), Some(UNDECIDED_WAIT));
    }

    #[test]
    fn a_file_of_another_version_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(root.path().join(FILE), text).unwrap();
        write(r#"{"version":2,"uids":{"own":"k1"}}"#);
        assert_eq!(started(root.path(), &[], &["own"], BEFORE).1, [text("own")]);
        write(r#"{"version":1,"uids":{"own":"k1","bad":"../etc"},"kubelet":"1.12"}"#);
        assert_eq!(started(root.path(), &[], &["own", "bad"], BEFORE).1, [text("k1"), text("bad")]);
    }

    struct Failing {
        failures: Mutex<u32>,
    }

    #[async_trait]
    impl SandboxListing for Failing {
        async fn static_sandboxes(&self, _: &str) -> Result<Vec<StaticSandbox>, String> {
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
        assert_eq!(list_sandboxes(&after(20), "file", UNDECIDED_WAIT).await, Some(vec![sandbox("k1", 1)]));
        assert!(began.elapsed() < UNDECIDED_WAIT);
        let began = Instant::now();
        assert_eq!(list_sandboxes(&after(u32::MAX), "file", UNDECIDED_WAIT).await, None);
        assert!(began.elapsed() <= UNDECIDED_WAIT, "{:?}", began.elapsed());
    }
}
