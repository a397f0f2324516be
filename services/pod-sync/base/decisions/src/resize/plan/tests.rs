use quintlet_model::runtime::Resources;
use quintlet_testkit::pods::{RuntimeBuilder, pod_json};
use serde_json::{Value, json};

use super::*;
use crate::resize::allocation::of_pod;

fn pod(containers: Value) -> Pod {
    pod_json(json!({"containers": containers}))
}

fn c(name: &str, cpu: &str, memory: &str) -> Value {
    json!({"name": name, "image": "i", "resources":
        {"requests": {"cpu": cpu, "memory": memory}, "limits": {"cpu": cpu, "memory": memory}}})
}

fn actions(now: &Pod, before: Option<&Pod>, runtime: &PodRuntime) -> (ResizeActions, Vec<ContainerChange>) {
    let record = before.map(of_pod);
    let mut actions = ResizeActions::default();
    let changes = pod::spec(now)
        .containers
        .iter()
        .map(|c| plan_container(now, c, runtime.newest(&c.name).unwrap(), record.as_ref(), &mut actions))
        .collect();
    (actions, changes)
}

#[test]
fn decreases_go_before_increases() {
    let before = pod(json!([c("a", "1", "64Mi"), c("b", "1", "64Mi"), c("c", "1", "64Mi")]));
    let after = pod(json!([c("a", "2", "96Mi"), c("b", "500m", "32Mi"), c("c", "1", "64Mi")]));
    let runtime = RuntimeBuilder::ready().running("a").running("b").running("c").build();
    let (got, changes) = actions(&after, Some(&before), &runtime);
    assert!(changes.iter().all(|c| *c == ContainerChange::InPlace));
    let names = |l: &[ContainerUpdate]| l.iter().map(|u| u.name.clone()).collect::<Vec<_>>();
    assert_eq!(
        (names(&got.memory), names(&got.cpu)),
        (vec!["b".into(), "a".into()], vec!["b".into(), "a".into()])
    );
    assert_eq!(got.cpu[0].from, RequestAndLimit { limit: Some(1000), request: Some(1000) });
    assert_eq!(got.cpu[0].to, RequestAndLimit { limit: Some(500), request: Some(500) });
    assert_eq!(got.memory[1].to.limit, Some(96 << 20));
    assert!(!got.pod && in_progress(&after, &runtime, Some(&of_pod(&before))));
    assert!(!in_progress(&after, &runtime, Some(&of_pod(&after))));
}

#[test]
fn each_resource_follows_its_own_policy() {
    let with = |resize_policy: &str, cpu: &str, memory: &str| {
        let mut c = c("a", cpu, memory);
        c["resizePolicy"] = json!([{"resourceName": resize_policy, "restartPolicy": "RestartContainer"}]);
        pod(json!([c]))
    };
    let runtime = RuntimeBuilder::ready().running("a").build();
    for (name, resize_policy, cpu, memory, want) in [
        ("memory restarts", "memory", "1", "96Mi", ContainerChange::Restart),
        ("cpu in place beside it", "memory", "2", "64Mi", ContainerChange::InPlace),
        ("cpu restarts", "cpu", "2", "64Mi", ContainerChange::Restart),
        ("both, one restarts", "cpu", "2", "96Mi", ContainerChange::Restart),
        ("nothing changes", "cpu", "1", "64Mi", ContainerChange::InPlace),
    ] {
        let (got, changes) =
            actions(&with(resize_policy, cpu, memory), Some(&with(resize_policy, "1", "64Mi")), &runtime);
        assert_eq!(changes, [want], "{name}");
        assert_eq!(got.pod, want == ContainerChange::Restart, "{name}");
        assert_eq!(
            got.memory.is_empty() && got.cpu.is_empty(),
            want == ContainerChange::Restart || name == "nothing changes"
        );
    }
}

#[test]
fn without_a_record_the_runtimes_word_counts_and_without_both_nothing_is_done() {
    let wants = pod(json!([c("a", "1", "64Mi")]));
    let with = |resources| RuntimeBuilder::ready().running("a").edit(|c| c.resources = resources).build();
    let actual = |shares, quota, memory| {
        Some(Resources {
            cpu_shares: shares,
            cpu_quota: quota,
            cpu_period: 100_000,
            memory_limit_bytes: memory,
        })
    };
    for (name, resources, memory, cpu) in [
        ("nothing reported", None, false, false),
        ("up to date", actual(1024, 100_000, 64 << 20), false, false),
        ("other memory", actual(1024, 100_000, 32 << 20), true, false),
        ("other quota", actual(1024, 50_000, 64 << 20), false, true),
        ("other shares", actual(512, 100_000, 64 << 20), false, true),
    ] {
        let runtime = with(resources);
        let (got, _) = actions(&wants, None, &runtime);
        assert_eq!((got.memory.len(), got.cpu.len()), (memory.into(), cpu.into()), "{name}");
        assert_eq!(in_progress(&wants, &runtime, None), memory || cpu, "{name}");
    }
}

#[test]
fn a_container_without_a_limit_uses_the_pod_level_limit() {
    let with = |cpu: &str, memory: &str, own: Value| {
        let level = json!({"requests": {"cpu": "50m"}, "limits": {"cpu": cpu, "memory": memory}});
        let container = json!({"name": "a", "image": "i", "resources": own});
        pod_json(json!({"resources": level, "containers": [container]}))
    };
    let requests = || json!({"requests": {"cpu": "50m"}});
    let runtime = RuntimeBuilder::ready().running("a").build();
    let (before, after) = (with("1", "64Mi", requests()), with("2", "64Mi", requests()));
    let (got, changes) = actions(&after, Some(&before), &runtime);
    assert_eq!((changes, got.memory.len(), got.pod), (vec![ContainerChange::InPlace], 0, false));
    let [update] = &got.cpu[..] else { panic!("{got:?}") };
    assert_eq!((update.from.limit, update.to.limit), (Some(1000), Some(2000)));
    // The other resource keeps its actuated amounts, and the record keeps those of the pod.
    let both = with("2", "96Mi", requests());
    let (got, _) = actions(&both, Some(&before), &runtime);
    let container = &pod::spec(&both).containers[0];
    for (resource, update, cpu, memory) in
        [(Resource::Cpu, &got.cpu[0], "2", "64Mi"), (Resource::Memory, &got.memory[0], "1", "96Mi")]
    {
        let (sent, kept) = actuated_resources(container, update, resource, Some(&of_pod(&before)));
        let want = json!({"requests": {"cpu": "50m"}, "limits": {"cpu": cpu, "memory": memory}});
        let sent = serde_json::to_value(sent).unwrap();
        assert_eq!(sent, want, "{resource:?}");
        assert_eq!(serde_json::to_value(kept).unwrap(), requests(), "{resource:?}");
    }
    // The second step uses the record of the first.
    let mut record = of_pod(&before);
    let level = pod::spec(&both).resources.as_ref();
    record.pod_level = Some(actuated_pod_level(record.pod_level, level, Resource::Memory));
    let (sent, _) = actuated_resources(container, &got.cpu[0], Resource::Cpu, Some(&record));
    let limits = json!({"cpu": "2", "memory": "96Mi"});
    assert_eq!(serde_json::to_value(sent.limits).unwrap(), limits);
    let own = || json!({"limits": {"cpu": "500m", "memory": "32Mi"}});
    let (got, _) = actions(&with("2", "96Mi", own()), Some(&with("1", "64Mi", own())), &runtime);
    assert!(got.cpu.is_empty() && got.memory.is_empty(), "{got:?}");
    // The runtime reports the pod-level limits that it was sent.
    let actual =
        Resources { cpu_shares: 51, cpu_quota: 100_000, cpu_period: 100_000, memory_limit_bytes: 64 << 20 };
    let runtime = RuntimeBuilder::ready().running("a").edit(|c| c.resources = Some(actual)).build();
    assert!(!in_progress(&before, &runtime, None));
    assert!(in_progress(&after, &runtime, None));
}

#[test]
fn a_container_that_does_not_run_is_not_resized_and_the_pod_level_is() {
    let before = pod(json!([c("a", "1", "64Mi")]));
    let after = pod(json!([c("a", "2", "64Mi")]));
    let stopped = RuntimeBuilder::ready().exited("a", 1).build();
    assert!(
        !in_progress(&after, &stopped, Some(&of_pod(&before))),
        "the container starts with its allocation"
    );
    let level = |cpu: &str| {
        pod_json(json!({"resources": {"limits": {"cpu": cpu}}, "containers": [{"name": "a", "image": "i"}]}))
    };
    let running = RuntimeBuilder::ready().running("a").build();
    assert!(in_progress(&level("2"), &running, Some(&of_pod(&level("1")))));
    assert!(!in_progress(&level("1"), &running, Some(&of_pod(&level("1000m")))));
    assert!(!in_progress(&level("1"), &running, None), "unknown values are not reported");
}

#[test]
fn the_pods_cgroup_grows_before_its_containers_and_shrinks_after_them() {
    use ResizeStep::{Containers, PodLimit, PodRequest};
    let now = CgroupState {
        memory_limit: Some(100),
        cpu_quota_us: Some(50_000),
        cpu_shares: 512,
        ..CgroupState::default()
    };
    let guarded = CgroupState { memory_protected: Some(60), ..now };
    let guard = |min, low| PodCgroup { memory_min: Some(min), memory_low: Some(low), ..PodCgroup::default() };
    let free = CgroupState { memory_limit: None, cpu_quota_us: None, ..now };
    let memory = |bytes| PodCgroup { memory_bytes: bytes, ..PodCgroup::default() };
    let cpu =
        |shares, quota| PodCgroup { cpu_shares: Some(shares), cpu_quota_us: quota, ..PodCgroup::default() };
    for (name, resource, now, wanted, want) in [
        ("memory grows", Resource::Memory, now, memory(Some(200)), vec![PodLimit, Containers]),
        ("memory shrinks", Resource::Memory, now, memory(Some(50)), vec![Containers, PodLimit]),
        ("memory stays", Resource::Memory, now, memory(Some(100)), vec![Containers]),
        ("a limit is not taken away", Resource::Memory, now, memory(None), vec![Containers]),
        ("a first limit shrinks", Resource::Memory, free, memory(Some(200)), vec![Containers, PodLimit]),
        ("cgroup v1 protects no memory", Resource::Memory, now, guard(0, 80), vec![Containers]),
        ("a protection grows", Resource::Memory, guarded, guard(0, 80), vec![PodRequest, Containers]),
        ("a protection shrinks", Resource::Memory, guarded, guard(40, 0), vec![Containers, PodRequest]),
        ("a protection stays", Resource::Memory, guarded, guard(60, 0), vec![Containers]),
        ("a protection is removed", Resource::Memory, guarded, guard(0, 0), vec![Containers, PodRequest]),
        ("cpu grows", Resource::Cpu, now, cpu(1024, Some(100_000)), vec![PodLimit, PodRequest, Containers]),
        ("cpu shrinks", Resource::Cpu, now, cpu(256, Some(25_000)), vec![Containers, PodRequest, PodLimit]),
        (
            "limit up, request down",
            Resource::Cpu,
            now,
            cpu(256, Some(100_000)),
            vec![PodLimit, Containers, PodRequest],
        ),
        ("only the request", Resource::Cpu, now, cpu(1024, None), vec![PodRequest, Containers]),
        ("a first quota shrinks", Resource::Cpu, free, cpu(512, Some(100_000)), vec![Containers, PodLimit]),
        ("no quota any more", Resource::Cpu, now, cpu(512, Some(-1)), vec![PodLimit, Containers]),
    ] {
        assert_eq!(resize_steps(resource, &now, &wanted), want, "{name}");
    }
}

#[test]
fn a_memory_limit_is_not_decreased_below_usage() {
    let update = |name: &str, old_limit, new_limit| ContainerUpdate {
        id: quintlet_testkit::pods::id(name),
        name: name.to_owned(),
        from: RequestAndLimit { limit: old_limit, request: None },
        to: RequestAndLimit { limit: new_limit, request: None },
    };
    let group =
        |limit, usage| CgroupState { memory_limit: limit, memory_usage: usage, ..CgroupState::default() };
    let wanted = |bytes| PodCgroup { memory_bytes: bytes, ..PodCgroup::default() };
    let pod_text = "attempting to set pod memory limit (100) below current usage (100)";
    let container_text = "attempting to set container \"a\" memory limit (100) below current usage (100)";
    for (name, now, wanted, updates, used, want) in [
        ("fits", group(Some(200), 99), wanted(Some(100)), vec![update("a", Some(200), Some(100))], 99, None),
        ("grows", group(Some(50), 100), wanted(Some(100)), vec![update("a", Some(50), Some(100))], 100, None),
        (
            "the pod uses more",
            group(Some(200), 100),
            wanted(Some(100)),
            vec![update("a", Some(200), Some(100))],
            0,
            Some(format!("cannot decrease memory limits: {pod_text}")),
        ),
        (
            "a container uses more",
            group(Some(200), 0),
            wanted(None),
            vec![update("a", Some(200), Some(100))],
            100,
            Some(format!("cannot decrease memory limits: {container_text}")),
        ),
        (
            "both, a first limit",
            group(None, 100),
            wanted(Some(100)),
            vec![update("a", None, Some(100))],
            100,
            Some(format!("cannot decrease memory limits: [{pod_text}, {container_text}]")),
        ),
        ("a limit goes", group(None, 100), wanted(None), vec![update("a", Some(100), None)], 100, None),
    ] {
        assert_eq!(memory_decrease_error(&now, &wanted, &updates, |_| Some(used)), want, "{name}");
    }
    let updates = [update("a", Some(200), Some(100))];
    assert_eq!(memory_decrease_error(&group(None, 0), &wanted(None), &updates, |_| None), None, "not known");
    // kubernetes/kubernetes#141100: the kubelet names the usage of the pod, and crashes if that is unknown.
    let updates = [update("a", Some(200), Some(100)), update("b", Some(300), Some(250))];
    let usage = |id: &ContainerId| Some(if *id == updates[0].id { 150 } else { 90 });
    let text = "attempting to set container \"a\" memory limit (100) below current usage (150)";
    let error = memory_decrease_error(&group(None, 240), &wanted(None), &updates, usage);
    assert_eq!(error.as_deref(), Some(&*format!("cannot decrease memory limits: {text}")));
}

#[test]
fn an_update_changes_only_its_own_resource() {
    let spec = pod(json!([c("a", "0.5", "64Mi")]));
    let mut resources = pod::spec(&spec).containers[0].resources.clone().unwrap();
    RequestAndLimit { limit: Some(128 << 20), request: None }.write(&mut resources, Resource::Memory);
    RequestAndLimit { limit: Some(500), request: Some(250) }.write(&mut resources, Resource::Cpu);
    assert_eq!(
        serde_json::to_value(&resources).unwrap(),
        json!({"limits": {"cpu": "0.5", "memory": "128Mi"}, "requests": {"cpu": "250m"}})
    );
}
