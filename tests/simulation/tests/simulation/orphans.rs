//! Pods in the runtime that no source has.

use quintlet_simulation::NODE;
use quintlet_simulation::watch::actions_on;
use quintlet_simulation::{Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Call, ContainerSeed, Method};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_pod_is_never_touched_and_an_owned_orphan_is_removed_once_all_sources_are_ready() {
    let sim = Sim::prepare(Options::default()).await;
    let foreign = sim.runtime.add_sandbox("foreign-uid", "foreign", "default", 0);
    let foreign_container = sim.runtime.add_container(&foreign, &ContainerSeed::running("theirs"));
    let orphan = sim.runtime.add_sandbox("orphan-uid", "orphan", "default", 0);
    let orphan_container = sim.runtime.add_container(&orphan, &ContainerSeed::running("ours"));
    sim.runtime.edit_sandbox(&orphan, |s| {
        s.annotations.insert("quintlet.dev/node".to_owned(), NODE.to_owned());
    });
    sim.api.faults().block("list pods");
    sim.api.faults().block("watch pods");
    sim.manifest("static", &pods::manifest("static"));
    for service in Service::ALL {
        sim.up(service);
    }
    // Once its pod has run and was removed, one source is ready and housekeeping has run.
    let runs = |r: &quintlet_testkit::fake_runtime::FakeRuntime| {
        r.containers().iter().any(|c| c.name() == "c-static" && c.running())
    };
    sim.wait_runtime("the static pod runs", runs).await;
    sim.remove_manifest("static");
    sim.wait_runtime("the static pod is gone", |r| {
        !r.sandboxes().iter().any(|s| s.config.metadata.as_ref().is_some_and(|m| m.name == "static-sim-node"))
    })
    .await;
    let ours = [orphan.clone(), orphan_container, "orphan-uid".to_owned()];
    assert_eq!(actions_on(&sim.runtime, &ours), Vec::<String>::new(), "before the API server has spoken");
    sim.api.faults().clear();
    sim.wait_runtime("the orphan is gone", |r| !r.sandboxes().iter().any(|s| s.id() == orphan)).await;
    let _uid = sim.create(pods::single("mine"));
    sim.wait_ready("mine").await;
    let theirs = [foreign.clone(), foreign_container.clone(), "foreign-uid".to_owned()];
    assert_eq!(actions_on(&sim.runtime, &theirs), Vec::<String>::new());
    assert!(sim.runtime.container(&foreign_container).unwrap().running());
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_pods_that_another_agent_left_in_cgroups_of_this_node_are_removed() {
    let sim = Sim::prepare(Options::default()).await;
    let parent = |root: &str, uid: &str| format!("{root}/kubepods/besteffort/pod{uid}");
    let add = |uid: &str, name: &str| sim.runtime.add_sandbox(uid, name, "default", 0);
    let (dead, exited) = (add("dead-uid", "dead"), add("exited-uid", "exited"));
    let container = sim.runtime.add_container(&exited, &ContainerSeed::running("done"));
    sim.runtime.exit(&container, 0);
    let (running, other) = (add("running-uid", "running"), add("other-uid", "other"));
    let unmarked = add("no-uid", "no");
    let theirs = sim.runtime.add_container(&running, &ContainerSeed::running("theirs"));
    for (id, uid) in [(&dead, "dead-uid"), (&exited, "exited-uid"), (&running, "running-uid")] {
        sim.runtime.leave_dead(id, &parent(sim.cgroup_root(), uid));
    }
    sim.runtime.leave_dead(&other, &parent("/other", "other-uid"));
    sim.runtime.leave_dead(&unmarked, "");
    for service in Service::ALL {
        sim.up(service);
    }
    sim.wait_runtime("the dead pods are gone", |r| {
        !r.sandboxes().iter().any(|s| s.id() == dead || s.id() == exited)
    })
    .await;
    for round in ["first", "second"] {
        let _uid = sim.create(pods::single(round));
        sim.wait_ready(round).await;
        sim.delete(round, Some(0));
        sim.wait_gone(round).await;
    }
    assert_eq!(actions_on(&sim.runtime, &[running, theirs, other.clone(), unmarked]), Vec::<String>::new());
    let is_status_of_other =
        |call: &Call| call.method == Method::PodSandboxStatus && call.subjects.contains(&other);
    assert!(
        sim.runtime.count_calls(is_status_of_other) < 4,
        "{:?}",
        sim.runtime.calls_of(Method::PodSandboxStatus)
    );
    sim.finish().await;
}
