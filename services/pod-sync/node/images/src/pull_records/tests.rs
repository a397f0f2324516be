use super::*;

const IMAGE: &str = "r.test/app:1";
const ID: &str = "sha256:9f5f";

struct Scene {
    dir: tempfile::TempDir,
    clock: Clock,
}

impl Scene {
    fn new() -> Self {
        let wall = "2026-09-26T06:36:38.9Z".parse().unwrap();
        Self { dir: tempfile::tempdir().unwrap(), clock: Clock::fixed(wall, Duration::from_secs(100)) }
    }

    fn open(&self) -> PullRecords {
        PullRecords::open(self.dir.path(), VerificationPolicy::default(), self.clock.clone()).unwrap()
    }

    fn files(&self, kind: &str) -> Vec<String> {
        let dir = std::fs::read_dir(self.dir.path().join("image_manager").join(kind)).unwrap();
        dir.map(|e| std::fs::read_to_string(e.unwrap().path()).unwrap()).collect()
    }

    fn path(&self, kind: &str, name: &str) -> PathBuf {
        self.dir.path().join("image_manager").join(kind).join(file_name(name))
    }
}

fn secret(name: &str) -> ImagePullSecret {
    let text = str::to_owned;
    ImagePullSecret {
        uid: text("u"),
        namespace: text("ns"),
        name: text(name),
        credential_hash: format!("hash-{name}"),
    }
}

fn opened_by(secret: ImagePullSecret) -> PullCredentials {
    PullCredentials { kubernetes_secrets: vec![secret], ..PullCredentials::default() }
}

fn listed(id: &str, names: &[&str]) -> Image {
    let names = names.iter().map(|n| (*n).to_owned()).collect();
    Image { id: id.to_owned(), names, size: 1, pinned: false }
}

#[test]
fn records_are_the_kubelets() {
    use std::os::unix::fs::PermissionsExt as _;
    let scene = Scene::new();
    let records = scene.open();
    assert_eq!(records.access(IMAGE, ID), Access::Free, "the image was present before");
    let begun = records.begin(IMAGE).unwrap();
    assert_eq!(
        scene.files("pulling"),
        [
            "{\"kind\":\"ImagePullIntent\",\"apiVersion\":\"kubelet.config.k8s.io/v1beta1\",\"image\":\"r.test/app:1\"}\n"
        ]
    );
    // printf %s r.test/app:1 | sha256sum
    assert!(
        scene
            .path("pulling", IMAGE)
            .ends_with("sha256-c0e034d9acdffd5904e314aedd0772fb1fc4db2efe8f927145fc6077d4bd2f69")
    );
    assert!(scene.path("pulling", IMAGE).exists());
    begun.pulled(ID, opened_by(secret("a&b")));
    assert!(scene.files("pulling").is_empty());
    assert_eq!(
        scene.files("pulled"),
        [concat!(
            r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","#,
            r#""lastUpdatedTime":"2026-09-26T06:36:38Z","imageRef":"sha256:9f5f","credentialMapping":{"r.test/app":"#,
            r#"{"kubernetesSecrets":[{"uid":"u","namespace":"ns","name":"a\u0026b","credentialHash":"hash-a\u0026b"}]}}}"#,
            "\n"
        )]
    );
    assert!(scene.path("pulled", ID).exists());
    let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&scene.dir.path().join("image_manager/pulled")), 0o700);
    assert_eq!(mode(&scene.path("pulled", ID)), 0o600);
    records.begin("r.test/all").unwrap().pulled("sha256:all", PullCredentials::node_wide());
    let text = std::fs::read_to_string(scene.path("pulled", "sha256:all")).unwrap();
    assert!(text.contains(r#""credentialMapping":{"r.test/all":{"nodePodsAccessible":true}}"#), "{text}");
}

#[test]
fn records_of_a_kubelet_are_used_and_unreadable_files_are_kept() {
    let scene = Scene::new();
    drop(scene.open());
    let old = |version: &str, id: &str| {
        format!(
            r#"{{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/{version}","lastUpdatedTime":null,"imageRef":"{id}","credentialMapping":{{"r.test/app":{{"kubernetesServiceAccounts":[{{"uid":"u","namespace":"ns","name":"sa"}}]}}}}}}"#
        )
    };
    for (id, text) in [
        ("alpha", old("v1alpha1", "alpha")),
        ("beta", old("v1beta1", "beta")),
        ("later", old("v7", "later")),
        ("torn", "{".to_owned()),
    ] {
        std::fs::write(scene.path("pulled", id), text).unwrap();
    }
    let tmp = scene.dir.path().join("image_manager/pulled/sha256-x.tmp");
    std::fs::write(&tmp, "{").unwrap();
    let records = scene.open();
    let sa =
        ImagePullServiceAccount { uid: "u".to_owned(), namespace: "ns".to_owned(), name: "sa".to_owned() };
    for (id, want) in [
        ("alpha", Access::Ask),
        ("beta", Access::Ask),
        ("later", Access::Pull),
        ("torn", Access::Pull),
        ("absent", Access::Free),
    ] {
        assert_eq!(records.access(IMAGE, id), want, "{id}");
        assert_eq!(scene.path("pulled", id).exists(), id != "absent");
    }
    records.begin(IMAGE).unwrap().pulled("torn", PullCredentials::node_wide());
    assert_eq!(records.access(IMAGE, "torn"), Access::Free);
    assert!(records.may_use(IMAGE, "beta", &[], std::slice::from_ref(&sa)));
    assert!(!records.may_use(IMAGE, "beta", &[secret("a")], &[]));
    assert_eq!(records.access("other.test/app", "beta"), Access::Pull, "pulled, but under another name");
}

#[test]
fn a_matching_credential_is_recorded_and_survives_a_restart() {
    let scene = Scene::new();
    let records = scene.open();
    records.begin(IMAGE).unwrap().pulled(ID, opened_by(secret("a")));
    assert_eq!(records.access(IMAGE, ID), Access::Ask);
    assert!(!records.may_use(IMAGE, ID, &[secret("b")], &[]));
    let copy = ImagePullSecret { name: "copy".to_owned(), ..secret("a") };
    assert!(records.may_use(IMAGE, ID, std::slice::from_ref(&copy), &[]));
    let rotated = ImagePullSecret { credential_hash: "new".to_owned(), ..copy };
    let records = scene.open();
    assert!(records.may_use(IMAGE, ID, &[rotated], &[]), "the copy is known by its coordinates");
}

#[test]
fn an_intent_is_kept_until_the_outcome_of_every_pull_is_known() {
    let scene = Scene::new();
    let records = scene.open();
    let (one, two) = (records.begin(IMAGE).unwrap(), records.begin(IMAGE).unwrap());
    one.failed();
    assert_eq!(scene.files("pulling").len(), 1);
    assert_eq!(records.access(IMAGE, ID), Access::Pull, "another pull may have brought it");
    drop(two);
    assert_eq!(scene.files("pulling").len(), 1, "interrupted: the outcome is unknown");
    records.begin(IMAGE).unwrap().failed();
    assert!(scene.files("pulling").is_empty());
    assert_eq!(records.access(IMAGE, ID), Access::Free);
}

#[test]
fn remaining_intents_become_records_without_credentials_if_the_image_is_present() {
    let scene = Scene::new();
    let records = scene.open();
    for image in [IMAGE, "busybox:latest", "r.test/never:1"] {
        drop(records.begin(image).unwrap());
    }
    let records = scene.open();
    let running = records.begin("r.test/running:1").unwrap();
    assert!(records.has_stale_intents());
    assert_eq!(records.access("busybox:latest", "sha256:bb"), Access::Pull);
    records.recover(&[
        listed(ID, &[IMAGE]),
        listed("sha256:bb", &["docker.io/library/busybox:latest"]),
        listed("sha256:rr", &["r.test/running:1"]),
    ]);
    assert_eq!(scene.files("pulling").len(), 1, "that of the pull in flight");
    assert!(!records.has_stale_intents());
    let records = scene.open();
    assert_eq!(records.access(IMAGE, ID), Access::Pull);
    assert_eq!(records.access("busybox:latest", "sha256:bb"), Access::Pull);
    assert_eq!(records.access("r.test/never:1", "sha256:nn"), Access::Free, "preloaded since");
    drop(running);
}

#[test]
fn records_of_removed_images_are_removed() {
    let scene = Scene::new();
    let records = scene.open();
    for id in ["gone", "here"] {
        records.begin(IMAGE).unwrap().pulled(id, PullCredentials::node_wide());
    }
    scene.clock.advance(Duration::from_secs(10));
    let since = scene.clock.boot();
    records.begin(IMAGE).unwrap().pulled("new", PullCredentials::node_wide());
    records.prune(&["here".to_owned()].into(), since);
    let records = scene.open();
    for (id, want) in [("gone", false), ("here", true), ("new", true)] {
        assert_eq!(scene.path("pulled", id).exists(), want, "{id}");
        assert_eq!(records.inner.lock().pulled.contains_key(id), want, "{id}");
    }
}
