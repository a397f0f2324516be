//! Bounded memory, progress after failures, and timeouts.

use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_simulation::{LONG, NODE, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{self, Method, Rule};
use quintlet_testkit::wait::until;
use tonic::Code;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_instances_do_not_accumulate_while_no_status_can_be_written() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--max-container-restart-period=1s"]);
    for service in Service::ALL {
        sim.up(service);
    }
    let uid = sim.create(pods::single("dies"));
    sim.wait_ready("dies").await;
    sim.api.faults().block("patch pods/status");
    for _ in 0..4 {
        let last = sim.runtime.newest(&uid, "c-dies").unwrap().id().to_owned();
        assert!(sim.runtime.exit(&last, 1));
        sim.wait_runtime("it runs again", |r| {
            r.newest(&uid, "c-dies").is_some_and(|c| c.running() && c.id() != last)
        })
        .await;
    }
    sim.wait_runtime("the one that runs and the one before it are left", |r| {
        r.containers().iter().filter(|c| c.pod_uid() == uid).count() == 2
    })
    .await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_lived_sandboxes_do_not_accumulate_in_a_busy_pod() {
    const TIMES: u64 = 7;
    let sim = Sim::start(Options { runtime: fake_runtime::Options::silent(), ..Options::default() }).await;
    // Each sandbox is lost before a container runs in it, so there is no back-off.
    sim.runtime.script(Rule::on(Method::PodSandboxStatus).latency(Duration::from_millis(300)));
    sim.runtime.script(Rule::on(Method::CreateContainer).fail(Code::Unknown, "no sandbox"));
    let uid = sim.create(pods::single("flaps"));
    while sim.runtime.count(Method::RunPodSandbox) < TIMES {
        sim.wait_runtime("a sandbox is there", |r| r.sandboxes().iter().any(|s| s.ready())).await;
        for sandbox in sim.sandboxes(&uid).iter().filter(|s| s.ready()) {
            sim.runtime.edit_sandbox(sandbox.id(), |s| s.set_state(v1::PodSandboxState::SandboxNotready));
        }
    }
    let left = sim.sandboxes(&uid).len();
    assert!(left <= 3, "{left} sandboxes of {TIMES} exist");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_that_cannot_be_removed_does_not_prevent_other_removals() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&[
        "--image-gc-high-threshold=100",
        "--image-maximum-gc-age=1s",
        "--minimum-image-ttl-duration=0s",
    ]);
    for name in ["old.test/a:1", "old.test/b:1"] {
        sim.runtime.add_image(name, 1 << 20);
    }
    // Whichever image comes first.
    sim.runtime.script(Rule::on(Method::RemoveImage).fail(Code::Internal, "in use by nobody").times(1));
    // The first collection only records the images. It is interrupted, so that the next one follows soon.
    let hung = sim.runtime.hang(Method::ImageFsInfo);
    for service in Service::ALL {
        sim.up(service);
    }
    sim.runtime.wait_count(Method::ImageFsInfo, 1).await;
    sim.restart(Service::CriProxy).await;
    sim.runtime.unscript(hung);
    until("one of the two is gone", LONG, async || {
        let images = sim.runtime.images();
        let left = images.iter().filter(|i| i.contains("old.test")).count();
        if left == 1 { Ok(()) } else { Err(images) }
    })
    .await;
    assert_eq!(sim.runtime.count(Method::RemoveImage), 2);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_hangs_is_reported_down_after_30_seconds() {
    let sim = Sim::start(Options::default()).await;
    let ready = || {
        let node = sim.api.get("nodes", "", NODE).unwrap_or_default();
        let all = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ready = all.into_iter().find(|c| c["type"] == "Ready").unwrap_or_default();
        format!("{} {}", ready["status"], ready["message"])
    };
    let is = async |what: &str| {
        until(what, LONG, async || {
            let now = ready();
            if now.contains(what) { Ok(()) } else { Err(now) }
        })
        .await;
    };
    is("\"True\"").await;
    let hung = sim.runtime.hang(Method::Status);
    is("\"False\" \"container runtime is down\"").await;
    sim.runtime.unscript(hung);
    is("\"True\"").await;
    sim.finish().await;
}
