//! Access of pods to images that are already present.

use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Method, Rule};
use serde_json::{Value, json};

const SECRET: &str = "private.test/team/secret:1";

fn pod(name: &str, image: &str, secrets: &[&str]) -> Value {
    let mut pod = pods::single(name);
    pod["spec"]["containers"][0]["image"] = json!(image);
    pod["spec"]["imagePullSecrets"] = secrets.iter().map(|s| json!({"name": s})).collect();
    pod
}

fn secret(sim: &Sim, name: &str, user: &str) {
    let config = json!({"auths": {"private.test": {"username": user, "password": format!("{user}-pass")}}});
    let object = json!({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
        "metadata": {"name": name, "namespace": "default"}, "stringData": {".dockerconfigjson": config.to_string()}});
    sim.api.create("secrets", "default", object).unwrap();
}

async fn refused(sim: &Sim, name: &str) {
    sim.wait_pod(name, "backs off", |p| {
        let c = p.container(&format!("c-{name}"));
        c.reason == "ImagePullBackOff" && c.message.contains("401 Unauthorized")
    })
    .await;
}

fn pulls(sim: &Sim) -> usize {
    sim.calls_about(Method::PullImage, SECRET)
}

fn records(sim: &Sim, kind: &str) -> Vec<String> {
    let dir = std::fs::read_dir(sim.root_dir().join("image_manager").join(kind)).unwrap();
    dir.map(|e| std::fs::read_to_string(e.unwrap().path()).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_is_accessible_only_with_the_credentials_that_pulled_it() {
    let mut sim = Sim::start(Options::default()).await;
    sim.runtime.protect("private.test/", "good", "good-pass");
    secret(&sim, "good", "good");
    secret(&sim, "copy", "good");
    secret(&sim, "bad", "bad");
    let _uid = sim.create(pod("first", SECRET, &["good"]));
    sim.wait_ready("first").await;
    assert_eq!(pulls(&sim), 1);

    let _uid = sim.create(pod("copy", SECRET, &["copy"]));
    sim.wait_ready("copy").await;
    sim.wait_event("copy", "no pull", |e| {
        e.message
            == format!("Container image {SECRET:?} already present on machine and can be accessed by the pod")
    })
    .await;
    assert_eq!(pulls(&sim), 1, "the same credential, in another secret");

    let _uid = sim.create(pod("nobody", SECRET, &[]));
    let _uid = sim.create(pod("other", SECRET, &["bad"]));
    refused(&sim, "nobody").await;
    refused(&sim, "other").await;
    let mut never = pod("never", SECRET, &[]);
    never["spec"]["containers"][0]["imagePullPolicy"] = json!("Never");
    let _uid = sim.create(never);
    sim.wait_pod("never", "has no information about other pods", |p| {
        let c = p.container("c-never");
        c.reason == "ErrImageNeverPull"
            && c.message == format!("Container image {SECRET:?} is not present with pull policy of Never")
    })
    .await;

    sim.runtime.add_image("private.test/team/preloaded:1", 1);
    let _uid = sim.create(pod("preloaded", "private.test/team/preloaded:1", &[]));
    sim.wait_ready("preloaded").await;

    let before = pulls(&sim);
    for name in ["nobody", "other", "never"] {
        sim.delete(name, Some(0));
        sim.wait_gone(name).await;
    }
    sim.restart(Service::PodSync).await;
    let _uid = sim.create(pod("again", SECRET, &["copy"]));
    sim.wait_ready("again").await;
    assert!(pulls(&sim) >= before && records(&sim, "pulled").len() == 1);
    let with_secret = sim.runtime.calls_of(Method::PullImage).into_iter().filter(|c| {
        let request = c.request::<quintlet_cri_api::v1::PullImageRequest>();
        request.auth.is_some_and(|a| a.username == "good")
    });
    assert_eq!(with_secret.count(), 1, "what opened the image outlives the process");
    let _uid = sim.create(pod("still", SECRET, &[]));
    refused(&sim, "still").await;

    sim.runtime.add_image("private.test/team/listed:1", 1);
    sim.set_pod_sync_args(&[
        "--image-pull-credentials-verification-policy=NeverVerifyAllowlistedImages",
        "--preloaded-images-verification-allowlist=private.test/team/listed",
    ]);
    sim.restart(Service::PodSync).await;
    let _uid = sim.create(pod("listed", "private.test/team/listed:1", &[]));
    let _uid = sim.create(pod("unlisted", "private.test/team/preloaded:1", &[]));
    sim.wait_ready("listed").await;
    refused(&sim, "unlisted").await;

    let recorded = format!("{:?} {:?}", sim.api.list("events"), records(&sim, "pulled"));
    assert!(!recorded.contains("good-pass"), "no password is reported");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_whose_pull_outlived_pod_sync_is_accessible_to_no_pod() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.protect("private.test/", "good", "good-pass");
    secret(&sim, "good", "good");
    let hangs = sim.runtime.script(Rule::on(Method::PullImage).about(SECRET).hang());
    let _uid = sim.create(pod("owner", SECRET, &["good"]));
    sim.wait_calls(Method::PullImage, SECRET, 1).await;
    assert_eq!(records(&sim, "pulling").len(), 1, "it is on disk before the call");
    sim.kill(Service::PodSync).await;
    sim.runtime.unscript(hangs);
    sim.wait_runtime("the image came", |r| r.images().contains(&SECRET.to_owned())).await;
    let _uid = sim.create(pod("thief", SECRET, &[]));
    sim.up(Service::PodSync);
    sim.wait_ready("owner").await;
    refused(&sim, "thief").await;
    assert_eq!(pulls(&sim).min(3), 3, "cut, again by its owner, refused to the thief");
    assert_eq!(records(&sim, "pulling"), Vec::<String>::new());
    let pulled = records(&sim, "pulled");
    assert!(pulled.len() == 1 && pulled[0].contains(r#""name":"good""#), "{pulled:?}");
    sim.finish().await;
}
