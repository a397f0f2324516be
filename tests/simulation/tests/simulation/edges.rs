//! Deletions during other work, lost containers, many restarting pods, and a reboot.

use std::time::Duration;

use quintlet_cri_api::v1;
use quintlet_simulation::{EventSeen, LONG, Options, Service, Sim, pods};
use quintlet_testkit::fake_runtime::{Behaviour, ExecReply, Method, Rule, StopReply};
use quintlet_testkit::wait::until;
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_deleted_while_its_image_is_pulled_never_starts() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("pull");
    pod["spec"]["containers"][0]["image"] = json!("example.test/slow:1");
    let slow = sim.runtime.script(Rule::on(Method::PullImage).hang());
    let uid = sim.create(pod);
    sim.runtime.wait_count(Method::PullImage, 1).await;
    sim.delete("pull", None);
    // If it were released before pod-sync has seen the deletion, the start would rightly continue.
    sim.wait_view("pull", "Terminating", |v| v.status == "Terminating").await;
    sim.runtime.unscript(slow);
    sim.wait_gone("pull").await;
    sim.wait_nothing_left(&uid).await;
    assert_eq!(sim.runtime.count(Method::CreateContainer), 0, "nothing is started in a pod that ends");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_deleted_while_it_waits_for_a_volume_is_removed_at_once() {
    let sim = Sim::start(Options::default()).await;
    let mut pod = pods::single("volume");
    pod["spec"]["volumes"] = json!([{"name": "v", "configMap": {"name": "slow"}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    // The response never arrives, and the client waits longer than this test. Only cancelling the sync ends
    // the wait.
    sim.api.faults().block("get configmaps");
    sim.api.faults().block("list configmaps");
    sim.api.faults().block("watch configmaps");
    let uid = sim.create(pod);
    until("the volume waits", LONG, async || {
        let requests = sim.api.counts().of("* configmaps");
        if requests > 0 { Ok(()) } else { Err(requests) }
    })
    .await;
    sim.delete("volume", None);
    sim.wait_gone("volume").await;
    assert_eq!(sim.warnings("volume"), [], "the wait was ended, not given up");
    assert_eq!(sim.runtime.count(Method::RunPodSandbox), 0);
    sim.wait_nothing_left(&uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_deletion_with_less_grace_ends_a_hanging_hook() {
    let sim = Sim::start(Options::default()).await;
    sim.runtime.on_exec(|_, _| ExecReply { after: Duration::from_secs(3600), ..ExecReply::default() });
    let mut pod = pods::single("hook");
    pod["spec"]["terminationGracePeriodSeconds"] = json!(3600);
    pod["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"exec": {"command": ["hook"]}}});
    let uid = sim.create(pod);
    sim.wait_ready("hook").await;
    let id = sim.runtime.newest(&uid, "c-hook").unwrap().id().to_owned();
    sim.delete("hook", None);
    sim.wait_calls(Method::ExecSync, &id, 1).await;
    sim.delete("hook", Some(2));
    sim.wait_gone("hook").await;
    let stops = sim.runtime.calls_of(Method::StopContainer);
    let timeouts: Vec<i64> = stops.iter().map(|c| c.request::<v1::StopContainerRequest>().timeout).collect();
    assert!(timeouts.iter().all(|t| *t <= 2), "{timeouts:?}");
    assert_eq!(sim.runtime.count(Method::ExecSync), 1, "the hook runs once");
    sim.wait_nothing_left(&uid).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_one_name_replace_each_other_within_a_second() {
    let sim = Sim::start(Options::default()).await;
    let mut last = sim.create(pods::single("again"));
    for _ in 0..4 {
        sim.delete("again", Some(0));
        sim.wait_gone("again").await;
        let next = sim.create(pods::single("again"));
        assert_ne!(next, last);
        last = next;
    }
    sim.wait_ready("again").await;
    sim.assert_started_once("again", &last);
    sim.wait_runtime("only the last is left", |r| r.sandboxes().iter().all(|s| s.pod_uid() == last)).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_killed_or_removed_by_another_client_is_recreated_once() {
    let sim = Sim::start(Options::default()).await;
    let sandbox = sim.create(pods::single("sandbox"));
    let container = sim.create(pods::single("removed"));
    sim.wait_ready("sandbox").await;
    sim.wait_ready("removed").await;

    let id = sim.sandboxes(&sandbox).remove(0).id().to_owned();
    sim.runtime.exit(&id, 137);
    sim.wait_pod("sandbox", "in its second sandbox", |p| p.is_ready() && p.restarts() == 1).await;
    sim.wait_event("sandbox", "SandboxChanged", |e| e.reason == "SandboxChanged").await;
    let ready = sim.sandboxes(&sandbox).iter().filter(|s| s.ready()).count();
    assert_eq!(ready, 1);

    let first = sim.runtime.newest(&container, "c-removed").unwrap().id().to_owned();
    sim.runtime.remove(&first);
    sim.wait_runtime("made again", |r| {
        r.newest(&container, "c-removed").is_some_and(|c| c.running() && c.id() != first)
    })
    .await;
    sim.wait_pod("removed", "Ready with its new container", |p| {
        p.is_ready() && !p.container("c-removed").id.ends_with(&first)
    })
    .await;
    assert_eq!(sim.sandboxes(&container).len(), 1);
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_replaced_while_its_pod_terminates_waits_for_the_name() {
    for fixed_uid in [false, true] {
        let sim = Sim::start(Options::default()).await;
        let slow = StopReply::Exits { after: Duration::from_millis(1500), code: 0 };
        sim.runtime.behave("c-static", Behaviour { exit: None, stop: slow });
        let manifest = |image: &str| {
            let mut pod = pods::manifest("static");
            pod["spec"]["containers"][0]["image"] = json!(image);
            if fixed_uid {
                pod["metadata"]["uid"] = json!("fixed");
            }
            pod
        };
        sim.manifest("static", &manifest("example.test/app:1"));
        sim.wait_ready("static-sim-node").await;
        if fixed_uid {
            sim.remove_manifest("static");
            sim.runtime.wait_count(Method::StopContainer, 1).await;
        }
        sim.manifest("static", &manifest("example.test/app:2"));
        sim.wait_runtime("the new one runs", |r| {
            r.containers().iter().any(|c| c.running() && image(c) == "example.test/app:2")
        })
        .await;
        // A mirror pod is identified by the hash of its manifest, which is the UID. With a fixed UID the
        // mirror pod stays.
        let runs = sim.runtime.containers().into_iter().find(|c| c.running()).unwrap().id().to_owned();
        sim.wait_pod("static-sim-node", "the mirror pod is that of the new pod", |p| {
            p.is_ready() && p.container("c-static").id.ends_with(&runs)
        })
        .await;
        let running: Vec<_> = sim.runtime.containers().into_iter().filter(|c| c.running()).collect();
        assert_eq!(running.len(), 1, "fixed uid {fixed_uid}");
        // The old pod had terminated before the new one started.
        let stop = sim.runtime.calls_of(Method::StopContainer).last().unwrap().at;
        let start = sim.runtime.calls_of(Method::RunPodSandbox).last().unwrap().at;
        assert!(start >= stop + Duration::from_millis(1500), "fixed uid {fixed_uid}");
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_terminated_by_its_own_spec_even_if_its_uid_is_reused() {
    let sim = Sim::start(Options::default()).await;
    let manifest = |image: &str, grace: i64| {
        let mut pod = pods::manifest("static");
        pod["metadata"]["uid"] = json!("fixed");
        pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        pod["spec"]["containers"][0]["image"] = json!(image);
        pod
    };
    sim.manifest("static", &manifest("example.test/app:1", 7));
    sim.wait_ready("static-sim-node").await;
    let old = sim.runtime.containers().remove(0).id().to_owned();
    // Its termination begins and cannot continue.
    sim.kill(Service::CriProxy).await;
    sim.remove_manifest("static");
    sim.wait_view("static", "ends", |v| v.status == "Terminating").await;
    let mut next = manifest("example.test/app:2", 20);
    next["spec"]["containers"][0]["lifecycle"] = json!({"preStop": {"exec": {"command": ["of the next"]}}});
    sim.manifest("static", &next);
    // A manifest that comes later in the directory is read with it.
    sim.manifest("zz-last", &pods::manifest("zz-last"));
    sim.wait_view("zz-last", "read", |_| true).await;
    sim.up(Service::CriProxy);
    sim.wait_runtime("the next one runs", |r| {
        r.containers().iter().any(|c| c.running() && image(c) == "example.test/app:2")
    })
    .await;
    assert_eq!(
        sim.runtime.count(Method::ExecSync),
        0,
        "a hook of the next one's has no place in the old one"
    );
    let stops = sim.runtime.calls_of(Method::StopContainer);
    let of_old = stops.iter().filter(|c| c.subjects.contains(&old));
    let graces: Vec<i64> = of_old.map(|c| c.request::<v1::StopContainerRequest>().timeout).collect();
    assert!(!graces.is_empty() && graces.iter().all(|grace| *grace <= 7), "{graces:?}");
    sim.finish().await;
}

fn image(c: &quintlet_testkit::fake_runtime::ContainerRecord) -> String {
    c.config.image.as_ref().map(|i| i.user_specified_image.clone()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_node_of_flapping_pods_settles() {
    const PODS: usize = 200;
    let mut sim = Sim::prepare(Options::default()).await;
    sim.set_pod_sync_args(&["--max-pods=200"]);
    for service in Service::ALL {
        sim.up(service);
    }
    for i in 0..PODS {
        let name = format!("flap-{i}");
        // Each container exits once soon after its first start.
        sim.runtime.behave(
            &format!("c-{name}"),
            Behaviour { exit: Some((Duration::from_millis(200 + 3 * i as u64), 1)), ..Behaviour::default() },
        );
        let _uid = sim.create(pods::single(&name));
    }
    // One after the other: watching all of them at once would cost more than the services.
    for i in 0..PODS {
        sim.wait_pod(&format!("flap-{i}"), "ended once", |p| p.restarts() > 0).await;
    }
    for i in 0..PODS {
        sim.runtime.behave(&format!("c-flap-{i}"), Behaviour::default());
    }
    for i in 0..PODS {
        sim.wait_ready(&format!("flap-{i}")).await;
    }
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wall_clock_that_is_an_hour_off_affects_no_back_off() {
    const HOUR: i64 = 3_600_000_000_000;
    for offset in [HOUR, -HOUR] {
        let sim = Sim::start(Options::default()).await;
        // Exits have times of the runtime's clock.
        sim.runtime.step_wall_clock(offset);
        sim.runtime.behave(
            "c-web",
            Behaviour { exit: Some((Duration::from_millis(100), 1)), ..Behaviour::default() },
        );
        let _uid = sim.create(pods::single("web"));
        sim.wait_runtime("three starts", |r| r.count(Method::StartContainer) >= 3).await;
        let starts = sim.runtime.calls_of(Method::StartContainer);
        // A back-off is recorded before the container is created, and its image is checked before that.
        let looks = sim.runtime.calls_of(Method::ImageStatus);
        let second = looks.iter().rfind(|look| look.at <= starts[1].at).unwrap();
        let waited = starts[2].at.duration_since(second.at);
        assert!(waited >= Duration::from_secs(10), "by {offset}: {waited:?}");
        sim.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_cluster_dns_is_reported_for_the_pod_and_for_the_node() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.disturb();
    sim.set_pod_sync_args(&["--cluster-dns="]);
    for service in Service::ALL {
        sim.up(service);
    }
    let _uid = sim.create(pods::single("web"));
    let text = "kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" policy. \
                Falling back to \"Default\" policy.";
    let is_it = |e: &EventSeen, message: &str| e.reason == "MissingClusterDNS" && e.message == message;
    let uid = sim.wait_ready("web").await.uid().to_owned();
    let of_pod = format!("pod: \"web_default({uid})\". {text}");
    sim.wait_event("web", "of the pod", |e| is_it(e, &of_pod)).await;
    sim.wait_event(quintlet_simulation::NODE, "of the node", |e| is_it(e, text)).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_the_nodes_resolv_conf_are_reported_for_the_node() {
    let mut sim = Sim::prepare(Options::default()).await;
    sim.disturb();
    let file = tempfile::NamedTempFile::new().unwrap();
    let domains: Vec<String> = (0..30).map(|n| format!("d{n}.example")).collect();
    std::fs::write(file.path(), format!("nameserver 192.0.2.1\nsearch {}\n", domains.join(" "))).unwrap();
    let path = file.path().display().to_string();
    sim.set_pod_sync_args(&[&format!("--resolv-conf={path}"), "--cluster-domain=cluster.local"]);
    sim.start_all();
    let text = format!("Resolv.conf file '{path}' contains search line consisting of more than 29 domains!");
    let is_it = |e: &EventSeen| e.reason == "CheckLimitsForResolvConf" && e.message == text;
    sim.wait_event(quintlet_simulation::NODE, "of the node", is_it).await;
    sim.finish().await;
}

// The machine reboots: the runtime keeps its records and no process, and /run is empty.
pub(super) async fn go_down(sim: &Sim) {
    for service in Service::ALL {
        sim.kill(service).await;
    }
    for sandbox in sim.runtime.sandboxes() {
        sim.runtime.exit(sandbox.id(), 255);
    }
    for container in sim.runtime.containers() {
        sim.runtime.exit_because(container.id(), 255, "Unknown");
    }
    std::fs::remove_dir_all(sim.paths().run()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_restart_counts_continue_and_no_old_address_is_reported() {
    let sim = Sim::start(Options::default()).await;
    let uid = sim.create(pods::single("web"));
    sim.manifest("static", &pods::manifest("static"));
    let before = sim.wait_ready("web").await;
    sim.wait_ready("static-sim-node").await;
    let old_ip = before.text("/status/podIP").to_owned();
    assert!(!old_ip.is_empty());

    go_down(&sim).await;
    let hold = sim.runtime.script(Rule::on(Method::RunPodSandbox).hang());
    for service in Service::ALL {
        sim.up(service);
    }
    sim.runtime.wait_count(Method::RunPodSandbox, 4).await;
    sim.wait_pod("web", "not Ready and without its old address", |p| {
        !p.is_ready() && p.text("/status/podIP").is_empty()
    })
    .await;
    sim.runtime.unscript(hold);
    let after = sim.wait_pod("web", "Ready again", |p| p.is_ready() && p.restarts() == 1).await;
    assert_eq!(after.uid(), uid);
    assert_ne!(after.text("/status/podIP"), old_ip);
    sim.wait_pod("static-sim-node", "Ready again", |p| p.is_ready() && p.restarts() == 1).await;
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_all_init_containers_run_again_although_an_old_container_was_created_only() {
    let sim = Sim::start(Options::default()).await;
    let exits = Behaviour { exit: Some((Duration::from_millis(50), 0)), ..Behaviour::default() };
    let names = ["init-a", "init-b", "c-web"];
    let mut pod = pods::single("web");
    pod["spec"]["initContainers"] = names[..2].iter().map(|name| pods::container(name)).collect();
    names[..2].iter().for_each(|name| sim.runtime.behave(name, exits));
    let hold = sim.runtime.script(Rule::on(Method::StartContainer).about("c-web").hang());
    let _uid = sim.create(pod);
    sim.runtime.wait_count(Method::StartContainer, 3).await;

    go_down(&sim).await;
    sim.runtime.unscript(hold);
    let old = sim.runtime.containers();
    let created = old.iter().find(|c| c.name() == "c-web").unwrap();
    // As containerd reports a container that a power failure kept from being started.
    sim.runtime.edit_container(created.id(), |status| {
        status.state = v1::ContainerState::ContainerCreated as i32;
        (status.started_at, status.finished_at, status.exit_code) = (0, 0, 0);
        status.reason.clear();
    });
    for service in Service::ALL {
        sim.up(service);
    }
    sim.wait_ready("web").await;
    let all = sim.runtime.containers();
    let new: Vec<&str> =
        all.iter().filter(|c| old.iter().all(|o| o.id() != c.id())).map(|c| c.name()).collect();
    assert_eq!(new, names, "containers of the new sandbox, in the order of their creation");
    sim.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_no_pod_of_the_api_server_gets_a_sandbox_before_the_static_pods_have_theirs() {
    const TAKES: Duration = Duration::from_millis(150);
    let sim = Sim::start(Options::default()).await;
    let of_api: Vec<String> = (0..8).map(|i| format!("api-{i}")).collect();
    let of_files: Vec<String> = (0..3).map(|i| format!("static-{i}")).collect();
    let uids: Vec<String> = of_api.iter().map(|name| sim.create(pods::single(name))).collect();
    of_files.iter().for_each(|name| sim.manifest(name, &pods::manifest(name)));
    let mirrors = of_files.iter().map(|name| format!("{name}-sim-node"));
    let all: Vec<String> = of_api.iter().cloned().chain(mirrors).collect();
    for name in &all {
        sim.wait_ready(name).await;
    }
    go_down(&sim).await;
    let before = sim.runtime.calls_of(Method::RunPodSandbox).len();
    sim.runtime.script(Rule::on(Method::RunPodSandbox).latency(TAKES));
    sim.start_all();
    for name in &all {
        sim.wait_pod(name, "Ready again", |p| p.is_ready() && p.restarts() == 1).await;
    }
    let calls = sim.runtime.calls_of(Method::RunPodSandbox).split_off(before);
    let (api, files): (Vec<_>, Vec<_>) =
        calls.iter().partition(|c| c.subjects.iter().any(|s| uids.contains(s)));
    assert_eq!((api.len(), files.len()), (of_api.len(), of_files.len()));
    let last = files.iter().map(|c| c.at).max().unwrap();
    let first = api.iter().map(|c| c.at).min().unwrap();
    assert!(first >= last + TAKES, "{:?}", first.checked_duration_since(last));
    sim.finish().await;
}
