use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use async_trait::async_trait;
use k8s_openapi::api::core::v1::{ConfigMap, PodCertificateProjection, Secret, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use parking_lot::Mutex;
use pod_sync_layout::{
    NodeSettings, ObjectError, ObjectKind, ObjectSource, Token, TokenError, TokenKey, TokenSource,
};
use quintlet_model::pod;
use quintlet_testkit::pods::pod_of;
use serde_json::{Value, json};

use super::*;
use crate::certificates::{CredentialBundle, TrustAnchors};

#[derive(Default)]
struct Objects {
    map: Mutex<Option<Value>>,
    down: Mutex<bool>,
}

#[async_trait]
impl ObjectSource for Objects {
    async fn config_map(&self, _: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError> {
        if *self.down.lock() {
            return Err(ObjectError::NotReady { kind: ObjectKind::ConfigMap });
        }
        match &*self.map.lock() {
            Some(v) if name == "cm" => Ok(Arc::new(serde_json::from_value(v.clone()).unwrap())),
            _ => Err(ObjectError::NotFound { kind: ObjectKind::ConfigMap, name: name.to_owned() }),
        }
    }

    async fn secret(&self, _: &str, name: &str) -> Result<Arc<Secret>, ObjectError> {
        if name == "s" {
            return Ok(Arc::new(serde_json::from_value(json!({"data": {"pw": "eA=="}})).unwrap()));
        }
        Err(ObjectError::NotFound { kind: ObjectKind::Secret, name: name.to_owned() })
    }

    async fn services(&self, _: &str) -> Result<Vec<Arc<Service>>, ObjectError> {
        Ok(vec![])
    }
}

struct Tokens;

#[async_trait]
impl TokenSource for Tokens {
    async fn request(&self, key: &TokenKey) -> Result<Token, TokenError> {
        let token = format!("{}/{}:{:?}", key.namespace, key.service_account, key.audiences);
        Ok(Token { token, expires: now() + jiff::SignedDuration::from_hours(1), expiration_seconds: 3600 })
    }
}

struct Anchors;

#[async_trait]
impl TrustAnchors for Anchors {
    async fn by_name(&self, name: &str, is_optional: bool) -> Result<String, String> {
        Ok(format!("{name} {is_optional}"))
    }

    async fn by_signer(
        &self,
        signer: &str,
        selector: Option<&LabelSelector>,
        is_optional: bool,
    ) -> Result<String, String> {
        let labels = selector.and_then(|selector| selector.match_labels.clone());
        Ok(format!("{signer} {labels:?} {is_optional}"))
    }
}

fn now() -> Timestamp {
    "2026-01-02T03:04:05Z".parse().unwrap()
}

/// The volumes of a pod that are ready, and those of them with their old content.
#[derive(Debug, PartialEq, Eq, Default)]
struct PodVolumes {
    volumes: MountedVolumes,
    stale: Vec<VolumeFailure>,
}

/// Sets up all direct volumes of a pod. The error has those that are not ready.
async fn set_up(
    volumes: &Volumes,
    pod: &Pod,
    uid: &PodUid,
    ctx: &VolumeContext,
) -> Result<PodVolumes, Vec<VolumeFailure>> {
    let direct: Vec<&Volume> = referenced(pod).into_iter().filter(|volume| is_direct(volume)).collect();
    let results: Arc<Mutex<Vec<SetUp>>> = Arc::default();
    let seen = Arc::clone(&results);
    let progress = move |_: &str, progress| seen.lock().push(progress);
    let failures = volumes.set_up(pod, uid, &direct, ctx, progress).await.unwrap();
    let mut stale = Vec::new();
    let mut failed = Vec::new();
    let mut begun = 0;
    for result in results.lock().drain(..) {
        match result {
            SetUp::Begun => begun += 1,
            SetUp::Ready => {}
            SetUp::Stale(failure) => stale.push(failure),
            SetUp::Failed { failure, .. } => failed.push(failure),
        }
    }
    assert_eq!((begun, failures.len()), (direct.len(), stale.len() + failed.len()));
    if failed.is_empty() { Ok(PodVolumes { volumes: volumes.mounted(pod, uid), stale }) } else { Err(failed) }
}

fn tear_down(volumes: &Volumes, root: &Path, uid: &PodUid) {
    volumes.tear_down_subpaths(uid).unwrap();
    for volume in found::read(root).unwrap().into_iter().filter(|volume| volume.pod == *uid) {
        volumes.tear_down(uid, &volume.plugin, &volume.name).unwrap();
    }
    volumes.release_projects(uid);
}

struct Node {
    dir: tempfile::TempDir,
    objects: Arc<Objects>,
    ctx: VolumeContext,
    volumes: Volumes,
    uid: PodUid,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let objects = Arc::new(Objects::default());
        *objects.map.lock() = Some(json!({"data": {"a": "1"}}));
        let ctx = VolumeContext {
            objects: objects.clone(),
            tokens: Some(Arc::new(Tokens)),
            trust_anchors: Some(Arc::new(Anchors)),
            node: Arc::new(NodeSettings::default()),
            now: now(),
        };
        let volumes = Volumes::new(dir.path().to_owned());
        Self { dir, objects, ctx, volumes, uid: PodUid::parse("u1").unwrap() }
    }

    async fn set_up(&self, pod: &Pod) -> Result<PodVolumes, Vec<VolumeFailure>> {
        set_up(&self.volumes, pod, &self.uid, &self.ctx).await
    }

    /// Tears down what the directories show.
    fn tear_down(&self) {
        tear_down(&self.volumes, self.dir.path(), &self.uid);
    }

    fn mounts(&self) -> usize {
        mount_table::mounts_below(&ProcMountTable, self.dir.path()).unwrap().len()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = teardown::tear_down_pod(&self.dir.path().join("pods/u1"), &ProcMountTable);
    }
}

fn pod_with(volumes: Value, context: Value) -> Pod {
    let mounts: Vec<Value> = volumes
        .as_array()
        .unwrap()
        .iter()
        .map(|v| json!({"name": v["name"], "mountPath": format!("/{}", v["name"].as_str().unwrap())}))
        .collect();
    pod_of(json!({"securityContext": context, "volumes": volumes,
        "containers": [{"name": "c", "volumeMounts": mounts}]}))
}

fn every_kind(host: &Path) -> Value {
    json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "mem", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "host", "hostPath": {"path": host, "type": "DirectoryOrCreate"}},
        {"name": "cm", "configMap": {"name": "cm", "defaultMode": 0o644}},
        {"name": "sec", "secret": {"secretName": "s", "defaultMode": 0o400}},
        {"name": "down", "downwardAPI": {"defaultMode": 0o644, "items": [{"path": "n", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        {"name": "proj", "projected": {"defaultMode": 0o644, "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607, "audience": "x"}},
            {"configMap": {"name": "cm", "items": [{"key": "a", "path": "ca.crt"}]}},
            {"configMap": {"name": "gone", "optional": true}},
            {"secret": {"name": "s"}},
            {"downwardAPI": {"items": [{"path": "ns", "fieldRef": {"fieldPath": "metadata.namespace"}}]}}]}},
    ])
}

#[tokio::test]
async fn every_kind_is_set_up_once_and_taken_down_without_a_trace() {
    let node = Node::new();
    let host = node.dir.path().join("on-host");
    let pod = pod_with(every_kind(&host), json!({}));
    let done = node.set_up(&pod).await.unwrap();
    assert!(done.stale.is_empty());
    let at = |v: &str| done.volumes[v].host_path.clone();
    assert_eq!(at("disk"), node.dir.path().join("pods/u1/volumes/kubernetes.io~empty-dir/disk"));
    assert_eq!(at("host"), host);
    let read = |v: &str, f: &str| fs::read_to_string(at(v).join(f)).unwrap();
    assert_eq!(read("cm", "a"), "1");
    assert_eq!(read("sec", "pw"), "x");
    assert_eq!(read("down", "n"), "web");
    assert_eq!(read("proj", "token"), "default/default:[\"x\"]");
    assert_eq!(read("proj", "ca.crt"), "1");
    assert_eq!((read("proj", "ns"), read("proj", "pw")), ("default".into(), "x".into()));
    let forced: Vec<&str> =
        done.volumes.iter().filter(|(_, v)| v.read_only).map(|(k, _)| k.as_str()).collect();
    assert_eq!(forced, ["cm", "down", "proj", "sec"]);
    assert_eq!(node.mounts(), 4, "mem, sec, down, proj");
    let markers = node.dir.path().join("pods/u1/plugins/kubernetes.io~empty-dir");
    let marked = || fs::read_dir(&markers).into_iter().flatten().flatten().map(|e| e.file_name());
    assert_eq!(marked().collect::<BTreeSet<_>>(), ["disk".into(), "mem".into()].into());
    // As the kubelet leaves it.
    fs::create_dir(markers.join("wrapped_sec")).unwrap();
    fs::write(markers.join("wrapped_sec/ready"), "").unwrap();

    fs::write(at("disk").join("mine"), "").unwrap();
    let version = fs::read_link(at("proj").join("..data")).unwrap();
    let restarted = Volumes::new(node.dir.path().to_owned());
    assert_eq!(set_up(&restarted, &pod, &node.uid, &node.ctx).await.unwrap(), done);
    assert_eq!(node.mounts(), 4);
    assert_eq!(fs::read_link(at("proj").join("..data")).unwrap(), version);
    assert!(at("disk").join("mine").exists());

    let dirs = pod_sync_layout::paths::pod_dir(node.dir.path(), &node.uid).join("volumes");
    let left = || {
        fs::read_dir(&dirs)
            .into_iter()
            .flatten()
            .flatten()
            .flat_map(|d| fs::read_dir(d.path()))
            .flatten()
            .count()
    };
    assert!(left() > 0);
    let found = found::read(node.dir.path()).unwrap();
    assert_eq!(found.len(), 6, "all but the host path: {found:?}");
    node.tear_down();
    for volume in found {
        node.volumes.tear_down(&node.uid, &volume.plugin, &volume.name).unwrap();
    }
    assert_eq!((left(), node.mounts()), (0, 0));
    assert_eq!(marked().count(), 0);
    assert!(host.is_dir(), "a host path is not ours to delete");
    node.volumes.remove_orphaned_pod_dir(&node.uid).unwrap();
    assert!(!dirs.exists());
}

#[tokio::test]
async fn content_follows_its_object_and_remains_after_the_deletion() {
    let node = Node::new();
    let pod = pod_with(json!([{"name": "cm", "configMap": {"name": "cm", "defaultMode": 0o644}}]), json!({}));
    let path = node.set_up(&pod).await.unwrap().volumes["cm"].host_path.clone();
    *node.objects.map.lock() = Some(json!({"data": {"b": "2"}}));
    assert_eq!(node.set_up(&pod).await.unwrap().stale, []);
    assert!(!path.join("a").exists());
    assert_eq!(fs::read_to_string(path.join("b")).unwrap(), "2");

    *node.objects.map.lock() = None;
    let failures = node.set_up(&pod).await.unwrap().stale;
    assert_eq!(
        failures[0].to_string(),
        "MountVolume.SetUp failed for volume \"cm\" : configmap \"cm\" not found"
    );
    assert_eq!(fs::read_to_string(path.join("b")).unwrap(), "2");
    *node.objects.down.lock() = true;
    let restarted = Volumes::new(node.dir.path().to_owned());
    let again = set_up(&restarted, &pod, &node.uid, &node.ctx).await.unwrap();
    assert_eq!(again.stale.len(), 1, "a known pod is maintained while the objects cannot be had");
    assert!(Volumes::needs_refresh("kubernetes.io/configmap"));
}

#[tokio::test]
async fn a_volume_failure_has_the_kubelets_message() {
    let node = Node::new();
    let fail = async |volume: Value| {
        let mut volume = volume;
        volume["name"] = json!("v");
        node.set_up(&pod_with(json!([volume]), json!({}))).await.unwrap_err()[0].to_string()
    };
    for (volume, want) in [
        (
            json!({"configMap": {"name": "gone", "defaultMode": 420}}),
            "MountVolume.SetUp failed for volume \"v\" : configmap \"gone\" not found",
        ),
        (
            json!({"secret": {"secretName": "gone", "defaultMode": 420}}),
            "MountVolume.SetUp failed for volume \"v\" : secret \"gone\" not found",
        ),
        (
            json!({"configMap": {"name": "cm", "defaultMode": 420, "items": [{"key": "z", "path": "z"}]}}),
            "MountVolume.SetUp failed for volume \"v\" : configmap references non-existent config key: z",
        ),
        (
            json!({"configMap": {"name": "cm"}}),
            "MountVolume.SetUp failed for volume \"v\" : no defaultMode used, not even the default value for it",
        ),
        (
            json!({"configMap": {"name": "cm", "defaultMode": 420, "items": [{"key": "a", "path": "../z"}]}}),
            "MountVolume.SetUp failed for volume \"v\" : invalid path: must not contain '..': ../z",
        ),
        (
            json!({"emptyDir": {"medium": "Tape"}}),
            "MountVolume.SetUp failed for volume \"v\" : unknown storage medium \"Tape\"",
        ),
        (
            json!({"hostPath": {"path": "/nowhere", "type": "Directory"}}),
            "MountVolume.SetUp failed for volume \"v\" : hostPath /nowhere doesn't exist",
        ),
        (
            json!({"flocker": {"datasetName": "d"}}),
            "MountVolume.FindPluginBySpec failed for volume \"v\" : no volume plugin matched: flocker is not supported",
        ),
        // The repository is not cloned: its hooks would run as root.
        (
            json!({"gitRepo": {"repository": "https://example.invalid/r.git", "directory": "."}}),
            "MountVolume.FindPluginBySpec failed for volume \"v\" : no volume plugin matched: gitRepo is not supported",
        ),
        (
            json!({"projected": {"defaultMode": 420, "sources": [{"secret": {"name": "gone"}}, {"configMap": {"name": "gone"}}]}}),
            "MountVolume.SetUp failed for volume \"v\" : [secret \"gone\" not found, configmap \"gone\" not found]",
        ),
        (
            json!({"projected": {"defaultMode": 420, "sources": [{"clusterTrustBundle": {"path": "p"}}]}}),
            "MountVolume.SetUp failed for volume \"v\" : \
             ClusterTrustBundle projection requires either name or signerName to be set",
        ),
    ] {
        assert_eq!(fail(volume.clone()).await, want, "{volume}");
    }
    let two = json!([{"name": "z", "configMap": {"name": "gone", "defaultMode": 420}}, {"name": "b", "flocker": {"datasetName": "d"}}, {"name": "ok", "emptyDir": {}}]);
    let failed = node.set_up(&pod_with(two, json!({}))).await.unwrap_err();
    let failed: Vec<&str> = failed.iter().map(|failure| failure.volume.as_str()).collect();
    assert_eq!(failed, ["z", "b"]);
    assert!(node.dir.path().join("pods/u1/volumes/kubernetes.io~empty-dir/ok").is_dir());
}

#[tokio::test]
async fn a_volume_that_no_container_mounts_is_ignored() {
    let node = Node::new();
    let pod = pod_of(
        json!({"volumes": [{"name": "v", "configMap": {"name": "gone"}}], "containers": [{"name": "c"}]}),
    );
    assert_eq!(node.set_up(&pod).await.unwrap(), PodVolumes::default());
}

#[tokio::test]
async fn the_fs_group_can_read_its_volume() {
    let node = Node::new();
    let pod = pod_with(every_kind(&node.dir.path().join("h")), json!({"fsGroup": 4242, "runAsUser": 7}));
    let done = node.set_up(&pod).await.unwrap();
    let mode_of = |v: &str, f: &str| {
        let m = fs::metadata(done.volumes[v].host_path.join(f)).unwrap();
        (m.uid(), m.gid(), m.permissions().mode() & 0o7777)
    };
    assert_eq!(mode_of("proj", "token"), (7, 4242, 0o640));
    assert_eq!(mode_of("sec", "pw"), (0, 4242, 0o440));
    assert_eq!(mode_of("disk", ""), (0, 4242, 0o2777));
    assert_eq!(mode_of("mem", ""), (0, 4242, 0o3777));
    assert_eq!(mode_of("host", "").1, 0);
}

#[tokio::test]
async fn a_volume_mounted_inside_another_finds_its_mount_point() {
    let node = Node::new();
    let pod = pod_of(json!({
        "volumes": [{"name": "cm", "configMap": {"name": "cm", "defaultMode": 0o644}}, {"name": "e", "emptyDir": {}}],
        "containers": [{"name": "c", "volumeMounts": [{"name": "cm", "mountPath": "/etc/app/"},
            {"name": "e", "mountPath": "/etc/app/run/x"}, {"name": "e", "mountPath": "/etc/app/run/x/y"},
            {"name": "e", "mountPath": "/etc/application"}]}]}));
    let path = node.set_up(&pod).await.unwrap().volumes["cm"].host_path.clone();
    assert!(path.join("run/x").is_dir());
    assert!(!path.join("run/x/y").exists());
    node.set_up(&pod).await.unwrap();
}

#[tokio::test]
async fn without_an_api_server_a_token_cannot_be_had() {
    let node = Node::new();
    let ctx = VolumeContext { tokens: None, ..node.ctx.clone() };
    let pod = pod_with(
        json!([{"name": "v", "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "t"}}]}}]),
        json!({}),
    );
    let failed = set_up(&node.volumes, &pod, &node.uid, &ctx).await.unwrap_err();
    let problem = "failed to fetch token: cannot use TokenManager when kubelet is in standalone mode";
    assert_eq!(failed[0].problem, problem);
}

#[tokio::test]
async fn certificates_of_trust_bundles_are_files_of_the_pods_user_or_group() {
    let node = Node::new();
    let sources = json!([
        {"clusterTrustBundle": {"path": "name", "name": "a"}},
        {"clusterTrustBundle": {"path": "d/optional", "name": "a", "signerName": "s", "optional": true}},
        {"clusterTrustBundle": {"path": "signer", "signerName": "s", "labelSelector": {"matchLabels": {"k": "v"}}}},
        {"clusterTrustBundle": {"path": "none", "signerName": "s", "optional": true}},
    ]);
    let volume = json!([{"name": "v", "projected": {"defaultMode": 0o644, "sources": sources}}]);
    for (context, mode) in
        [(json!({}), 0o644), (json!({"runAsUser": 4242}), 0o600), (json!({"fsGroup": 4242}), 0o640)]
    {
        let pod = pod_with(volume.clone(), context.clone());
        let path = node.set_up(&pod).await.unwrap().volumes["v"].host_path.clone();
        for (file, content) in [
            ("name", "a false"),
            ("d/optional", "a true"),
            ("signer", r#"s Some({"k": "v"}) false"#),
            ("none", "s None true"),
        ] {
            assert_eq!(std::fs::read_to_string(path.join(file)).unwrap(), content);
            let metadata = std::fs::metadata(path.join(file)).unwrap();
            assert_eq!(metadata.mode() & 0o777, mode, "{context} {file}");
            let owner = if context["runAsUser"].is_null() { 0 } else { 4242 };
            assert_eq!(metadata.uid(), owner, "{context} {file}");
        }
        node.tear_down();
    }
    let ctx = VolumeContext { trust_anchors: None, ..node.ctx.clone() };
    let failed = set_up(&node.volumes, &pod_with(volume, json!({})), &node.uid, &ctx).await.unwrap_err();
    assert_eq!(failed[0].problem, "ClusterTrustBundle projection is not supported in static kubelet mode");
}

#[tokio::test]
async fn files_belong_to_the_users_of_their_volume_with_the_feature_gate() {
    let mut node = Node::new();
    let items = json!([{"key": "a", "path": "item", "user": 2000}, {"key": "a", "path": "rest"}]);
    let name = json!({"path": "name", "fieldRef": {"fieldPath": "metadata.name"}, "user": 2000});
    let volumes = json!([
        {"name": "cm", "configMap": {"name": "cm", "defaultMode": 0o644, "defaultUser": 1000, "items": items}},
        {"name": "sec", "secret": {"secretName": "s", "defaultMode": 0o400, "defaultUser": 1000}},
        {"name": "down", "downwardAPI": {"defaultMode": 0o644, "defaultUser": 1000, "items": [name]}},
        {"name": "proj", "projected": {"defaultMode": 0o644, "defaultUser": 1000, "sources": [
            {"configMap": {"name": "cm", "items": items}},
            {"secret": {"name": "s"}},
            {"downwardAPI": {"items": [name]}},
            {"serviceAccountToken": {"path": "token"}},
            {"serviceAccountToken": {"path": "own-token", "user": 0}},
            {"clusterTrustBundle": {"path": "anchors", "name": "a", "user": 3000}},
        ]}},
    ]);
    let pod = pod_with(volumes, json!({"runAsUser": 4242}));
    for (gate, of_projection) in
        [(false, [0, 0, 0, 0, 4242, 4242, 4242]), (true, [2000, 1000, 1000, 2000, 1000, 0, 3000])]
    {
        let mut settings = NodeSettings::default();
        settings.field_gates.file_owners = gate;
        node.ctx.node = Arc::new(settings);
        let ready = node.set_up(&pod).await.unwrap().volumes;
        let owner =
            |volume: &str, file: &str| std::fs::metadata(ready[volume].host_path.join(file)).unwrap().uid();
        let own = |user| if gate { user } else { 0 };
        assert_eq!([owner("cm", "item"), owner("cm", "rest")], [own(2000), own(1000)]);
        assert_eq!([owner("sec", "pw"), owner("down", "name")], [own(1000), own(2000)]);
        let files = ["item", "rest", "pw", "name", "token", "own-token", "anchors"];
        assert_eq!(files.map(|file| owner("proj", file)), of_projection, "feature gate: {gate}");
        node.tear_down();
    }
}

#[tokio::test]
async fn an_empty_dir_has_the_mode_of_its_volume_with_the_feature_gate() {
    let mut node = Node::new();
    let pod = pod_with(
        json!([
            {"name": "disk", "emptyDir": {"mode": 0o750}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "mode": 0o1700}},
            {"name": "plain", "emptyDir": {}},
        ]),
        json!({}),
    );
    for (gate, want) in [(false, [0o777, 0o1777, 0o777]), (true, [0o750, 0o1700, 0o777])] {
        let mut settings = NodeSettings::default();
        settings.field_gates.empty_dir_mode = gate;
        node.ctx.node = Arc::new(settings);
        let ready = node.set_up(&pod).await.unwrap().volumes;
        let mode = |volume: &str| std::fs::metadata(&ready[volume].host_path).unwrap().mode() & 0o7777;
        assert_eq!(["disk", "memory", "plain"].map(mode), want, "feature gate: {gate}");
        node.tear_down();
    }
}

#[derive(Default)]
struct Bundles {
    reads: Mutex<Vec<(String, usize)>>,
    forgotten: Mutex<Vec<PodUid>>,
}

impl CredentialBundles for Bundles {
    fn read(
        &self,
        pod: &Pod,
        uid: &PodUid,
        volume: &str,
        index: usize,
        source: &PodCertificateProjection,
    ) -> Result<Arc<CredentialBundle>, String> {
        assert_eq!((pod.metadata.name.as_deref(), uid.as_str()), (Some("web"), "u1"));
        self.reads.lock().push((volume.to_owned(), index));
        if source.signer_name == "slow" {
            return Err("credential bundle is not issued yet".to_owned());
        }
        let certificates = format!("certificate {index}\n");
        Ok(Arc::new(CredentialBundle { key: format!("key {index}\n"), certificates }))
    }

    fn changes(&self, _: &PodUid) -> u64 {
        7
    }

    fn forget(&self, uid: &PodUid) {
        self.forgotten.lock().push(uid.clone());
    }
}

#[tokio::test]
async fn keys_and_certificates_are_files_of_the_pods_user_or_group_and_dropped_with_the_volumes() {
    let node = Node::new();
    let bundles = Arc::new(Bundles::default());
    let credentials = Arc::clone(&bundles) as Arc<dyn CredentialBundles>;
    let volumes = Volumes::new(node.dir.path().to_owned()).with_credentials(Some(credentials));
    let source = |more: Value| {
        let mut source = json!({"signerName": "s", "keyType": "ED25519"});
        source.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"podCertificate": source})
    };
    let sources = json!([
        source(json!({"credentialBundlePath": "bundle", "keyPath": "", "certificateChainPath": "d/chain"})),
        {"configMap": {"name": "cm"}},
        source(json!({"keyPath": "key", "certificateChainPath": "chain"})),
    ]);
    let volume = json!([{"name": "v", "projected": {"defaultMode": 0o644, "sources": sources}}]);
    for (context, mode) in
        [(json!({}), 0o644), (json!({"runAsUser": 4242}), 0o600), (json!({"fsGroup": 4242}), 0o640)]
    {
        let pod = pod_with(volume.clone(), context.clone());
        let done = set_up(&volumes, &pod, &node.uid, &node.ctx).await.unwrap();
        let path = done.volumes["v"].host_path.clone();
        for (file, content) in [
            ("bundle", "key 0\ncertificate 0\n"),
            ("d/chain", "certificate 0\n"),
            ("key", "key 2\n"),
            ("chain", "certificate 2\n"),
        ] {
            assert_eq!(fs::read_to_string(path.join(file)).unwrap(), content);
            let metadata = fs::metadata(path.join(file)).unwrap();
            assert_eq!(metadata.mode() & 0o777, mode, "{context} {file}");
            let owner = if context["runAsUser"].is_null() { 0 } else { 4242 };
            assert_eq!(metadata.uid(), owner, "{context} {file}");
        }
        tear_down(&volumes, node.dir.path(), &node.uid);
    }
    assert_eq!(bundles.reads.lock()[..2], [("v".to_owned(), 0), ("v".to_owned(), 2)]);
    assert_eq!(*bundles.forgotten.lock(), [node.uid.clone(), node.uid.clone(), node.uid.clone()]);
    let slow = json!([{"name": "v", "projected": {"defaultMode": 420, "sources": [
        {"podCertificate": {"signerName": "slow", "keyType": "ED25519", "keyPath": "k"}},
    ]}}]);
    let text = |failures: Vec<VolumeFailure>| failures[0].to_string();
    let prefix = "MountVolume.SetUp failed for volume \"v\" : ";
    let pod = pod_with(slow, json!({}));
    let failed = set_up(&volumes, &pod, &node.uid, &node.ctx).await.unwrap_err();
    assert_eq!(text(failed), format!("{prefix}credential bundle is not issued yet"));
    let without = node.set_up(&pod).await.unwrap_err();
    assert_eq!(text(without), format!("{prefix}unimplemented"));
    assert_eq!((volumes.changes(&node.uid), node.volumes.changes(&node.uid)), (7, 0));
}

#[test]
fn a_volume_has_the_outermost_mount_points_of_others_inside_it() {
    let nested = |mounts: Value| {
        let pod = pod_of(json!({"containers": [{"name": "c", "volumeMounts": mounts}]}));
        let found = nested_mount_points(&pod).into_iter();
        let list = |points: BTreeSet<PathBuf>| points.into_iter().map(|p| p.display().to_string()).collect();
        found.map(|(volume, points)| (volume, list(points))).collect::<Vec<(String, Vec<String>)>>()
    };
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
    let got = nested(json!([
        mount("a", "/x"),
        mount("b", "/x/y/z"),
        mount("c", "/x/y"),
        mount("d", "/x-y"),
        mount("e", "x/w/"),
        mount("a", "/x/w/v"),
    ]));
    let want = [
        ("a".to_owned(), vec!["w".to_owned(), "y".to_owned()]),
        ("c".to_owned(), vec!["z".to_owned()]),
        ("e".to_owned(), vec!["v".to_owned()]),
    ];
    assert_eq!(got, want);
    let many: Vec<Value> = (0..15_000).map(|n| mount(&format!("v{n}"), &format!("/m/{n}"))).collect();
    let began = Instant::now();
    assert_eq!(nested(Value::from(many)), []);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_key_that_fills_a_thousand_files_is_refused_before_it_fills_the_memory() {
    let node = Node::new();
    *node.objects.map.lock() = Some(json!({"data": {"a": "x".repeat(1 << 20)}}));
    let items: Vec<Value> = (0..1000).map(|n| json!({"key": "a", "path": n.to_string()})).collect();
    let volumes = |items: &[Value]| {
        pod_of(json!({
            "containers": [{"name": "c", "volumeMounts": [
                {"name": "v", "mountPath": "/v"}, {"name": "w", "mountPath": "/w"}]}],
            "volumes": [
                {"name": "v", "configMap": {"name": "cm", "defaultMode": 420, "items": items}},
                {"name": "w", "configMap": {"name": "cm", "defaultMode": 420, "items": items}},
            ],
        }))
    };
    for (count, failures) in [(1000, 2), (100, 1)] {
        let pod = volumes(&items[..count]);
        let failed = node.set_up(&pod).await.unwrap_err();
        assert_eq!(failed.len(), failures, "{failed:?}");
        let text = "the files of the pod's volumes take more than 134217728 bytes";
        assert_eq!(failed[0].problem, text);
        // The volumes of a pod are counted together, also when one is set up alone.
        let alone = pod::spec(&pod).volumes.as_ref().unwrap().last().unwrap();
        let failed = node.volumes.set_up(&pod, &node.uid, &[alone], &node.ctx, |_, _| {}).await.unwrap();
        assert_eq!((failed[0].volume.as_str(), failed[0].problem.as_str()), ("w", text));
    }
}

#[tokio::test]
async fn a_set_up_that_fails_says_whether_it_left_a_part() {
    let node = Node::new();
    let part = async |volume: Value| {
        let mut volume = volume;
        volume["name"] = json!("v");
        let pod = pod_with(json!([volume]), json!({}));
        let last_progress: Arc<Mutex<Option<SetUp>>> = Arc::default();
        let last = Arc::clone(&last_progress);
        let progress = move |_: &str, progress| *last.lock() = Some(progress);
        let volume = pod::spec(&pod).volumes.as_ref().unwrap();
        let all: Vec<&Volume> = volume.iter().collect();
        node.volumes.set_up(&pod, &node.uid, &all, &node.ctx, progress).await.unwrap();
        let last = last_progress.lock().take();
        match last {
            Some(SetUp::Failed { is_partial, .. }) => is_partial,
            other => panic!("{other:?}"),
        }
    };
    assert!(!part(json!({"configMap": {"name": "gone", "defaultMode": 420}})).await);
    assert!(!part(json!({"emptyDir": {"medium": "Tape"}})).await);
    assert!(!part(json!({"hostPath": {"path": "/nowhere", "type": "Directory"}})).await);
    // A file in place of the volume's directory.
    for plugin in ["configmap", "empty-dir"] {
        let dir = node.dir.path().join(format!("pods/u1/volumes/kubernetes.io~{plugin}"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("v"), "").unwrap();
    }
    assert!(part(json!({"configMap": {"name": "cm", "defaultMode": 420}})).await);
    assert!(part(json!({"emptyDir": {}})).await);
}

#[tokio::test]
async fn without_the_directories_of_the_pod_each_volume_fails() {
    let node = Node::new();
    fs::write(node.dir.path().join("pods"), "").unwrap();
    let pod = pod_with(json!([{"name": "e", "emptyDir": {}}, {"name": "f", "emptyDir": {}}]), json!({}));
    let direct: Vec<&Volume> = pod::spec(&pod).volumes.iter().flatten().collect();
    let failed: Arc<Mutex<Vec<String>>> = Arc::default();
    let failures = Arc::clone(&failed);
    let progress = move |name: &str, progress| match progress {
        SetUp::Begun => {}
        SetUp::Failed { failure, is_partial: false } => failures.lock().push(format!("{name}: {failure}")),
        other => panic!("{other:?}"),
    };
    let error = node.volumes.set_up(&pod, &node.uid, &direct, &node.ctx, progress).await.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(20), "{error}");
    assert_eq!(failed.lock().len(), 2);
    let text = "MountVolume.SetUp failed for volume \"e\" : error making pod data directories: ";
    assert!(failed.lock()[0].starts_with(&format!("e: {text}")), "{failed:?}");
}

/// A file system on which every command succeeds.
struct AnyProject;

impl quotas::QuotaTool for AnyProject {
    fn has_accounting(&self, _: &quotas::Mount) -> io::Result<bool> {
        Ok(true)
    }
    fn project_of(&self, _: &Path) -> io::Result<u32> {
        Ok(0)
    }
    fn set_project(&self, _: &quotas::Mount, _: &Path, _: u32) -> io::Result<()> {
        Ok(())
    }
    fn usage(&self, _: &quotas::Mount, _: u32) -> io::Result<quotas::QuotaUsage> {
        Ok(quotas::QuotaUsage::default())
    }
}

#[tokio::test]
async fn new_disk_volumes_of_a_pod_with_a_user_namespace_have_projects_until_they_are_removed() {
    let mut node = Node::new();
    let root = node.dir.path().to_owned();
    fs::write(root.join("mounts"), format!("/dev/a {} ext4 rw,prjquota 0 0\n", root.display())).unwrap();
    let quotas = ProjectQuotas::with_tool(&root, &root, root.join("mounts"), Box::new(AnyProject));
    let listed = || -> Vec<String> {
        let text = fs::read_to_string(root.join("projects")).unwrap_or_default();
        text.lines().map(|line| line.rsplit_once('/').unwrap().1.to_owned()).collect()
    };
    let volumes = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "mem", "emptyDir": {"medium": "Memory"}},
        {"name": "cm", "configMap": {"name": "cm", "defaultMode": 0o644}},
    ]);
    let mut pod = pod_with(volumes, json!({}));
    node.volumes = node.volumes.clone().with_quotas(quotas);
    node.set_up(&pod).await.unwrap();
    assert_eq!(listed(), [""; 0], "its containers could change projects");
    if let Some(spec) = &mut pod.spec {
        spec.host_users = Some(false);
    }
    node.set_up(&pod).await.unwrap();
    assert_eq!(listed(), [""; 0], "the volume may be full of files");
    node.tear_down();
    node.set_up(&pod).await.unwrap();
    assert_eq!(listed(), ["disk"]);
    node.tear_down();
    assert_eq!(listed(), [""; 0]);
}
