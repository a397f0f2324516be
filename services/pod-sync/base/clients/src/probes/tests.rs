use quintlet_model::ids::ContainerId;
use quintlet_model::probe::ProbeResult;

use super::*;

fn memory(id: &str, counter: u64) -> ProbeMemory {
    ProbeMemory {
        container_id: ContainerId::parse(id).unwrap(),
        counter,
        result: Some(ProbeResult::Success),
        last: ProbeResult::Success,
        run: 1,
        on_hold: false,
    }
}

#[test]
fn the_higher_counter_wins_and_a_new_instance_replaces() {
    let mut all = PodMemory::new();
    for (id, counter, changed) in
        [("c1", 3, true), ("c1", 2, false), ("c1", 3, false), ("c1", 4, true), ("c2", 0, true)]
    {
        assert_eq!(merge(&mut all, "a", ProbeType::Liveness, memory(id, counter)), changed, "{id} {counter}");
    }
}

const GONE: Duration = Duration::from_millis(2100);

/// Instances a and b, with a pod; the instance that has the pod and the other one.
fn two(probes: &Probes, uid: &PodUid) -> (String, String) {
    probes.update_instances(&ids(&["a", "b"]));
    probes.set_target(uid, target()).unwrap();
    let at = place(probes, uid).instance().unwrap().to_owned();
    let other = if at == "a" { "b" } else { "a" };
    (at, other.to_owned())
}

fn ids(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

fn place(probes: &Probes, uid: &PodUid) -> Place {
    probes.desired.read().pods[uid].place.clone()
}

fn generation(probes: &Probes, uid: &PodUid) -> u64 {
    probes.desired.read().pods[uid].target.generation
}

fn target() -> wire::PodTarget {
    let probe = wire::ProbeSpec { r#type: wire::ProbeType::Liveness as i32, ..Default::default() };
    let container = wire::ContainerTarget {
        name: "a".into(),
        container_id: "c1".into(),
        probes: vec![probe],
        ..Default::default()
    };
    wire::PodTarget { uid: "u".into(), containers: vec![container], ..Default::default() }
}

/// A report of the pod's only probe.
fn reported(generation: u64, counter: u64) -> wire::Result {
    wire::Result {
        uid: "u".into(),
        generation,
        container: "a".into(),
        r#type: wire::ProbeType::Liveness as i32,
        memory: Some((&memory("c1", counter)).into()),
        output: String::new(),
    }
}

fn counter(probes: &Probes, uid: &PodUid) -> Option<u64> {
    probes.memory(uid).get(&("a".to_owned(), ProbeType::Liveness)).map(|m| m.counter)
}

/// Messages that the stream of an instance would send, as text.
fn messages(probes: &Probes, id: &str, sent: &mut Sent) -> Vec<String> {
    use wire::drive_request::Request as DriverRequest;
    let all = probes.difference(id, sent);
    let word = |(request, _)| match request {
        DriverRequest::Target(t) => {
            let seed = t.containers[0].probes[0].memory.as_ref().map(|m| m.counter);
            format!("target {} seed {seed:?}", t.generation)
        }
        DriverRequest::Release(r) => format!("release {}", r.generation),
        DriverRequest::Remove(r) => format!("remove {}", r.generation),
        DriverRequest::Hello(_) | DriverRequest::Complete(_) => "other".to_owned(),
    };
    all.into_iter().map(word).collect()
}

#[test]
fn an_older_instance_gets_no_probe_that_it_would_run_in_another_way() {
    use wire::probe_spec::Handler;
    let peer = Neighbour::new("probe-service a", FEATURES);
    let grpc = |tls| Handler::Grpc(wire::Grpc { tls, ..wire::Grpc::default() });
    let http = |h2c| Handler::Http(wire::HttpGet { h2c, ..wire::HttpGet::default() });
    let handlers =
        [grpc(false), grpc(true), http(false), http(true), Handler::Tcp(wire::TcpSocket::default())];
    let sent = |features: &[&str]| {
        let features = features.iter().map(|name| (*name).to_owned()).collect();
        let hello = quintlet_proto::common::v1::Hello { features, ..quintlet_proto::hello() };
        peer.greeted(&hello).unwrap();
        let mut target = target();
        let probe =
            |handler: &Handler| wire::ProbeSpec { handler: Some(handler.clone()), ..Default::default() };
        target.containers[0].probes = handlers.iter().map(probe).collect();
        let mut message = wire::drive_request::Request::Target(target);
        leave_out_unknown(&mut message, &peer);
        let wire::drive_request::Request::Target(target) = message else { panic!("another message") };
        let probes = &target.containers[0].probes;
        handlers.iter().map(|all| probes.iter().any(|p| p.handler.as_ref() == Some(all))).collect::<Vec<_>>()
    };
    assert_eq!(sent(&quintlet_proto::features::ALL), [true; 5]);
    assert_eq!(sent(&[]), [true, false, true, false, true]);
    assert_eq!(sent(&[quintlet_proto::features::HTTP_PROBE_H2C]), [true, false, true, true, true]);
}

#[tokio::test(start_paused = true)]
async fn a_moved_pod_is_released_and_keeps_its_final_memory() {
    let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
    let uid = PodUid::parse("u").unwrap();
    let (first, other) = two(&probes, &uid);
    probes.update_instances(&ids(&[&other]));
    tokio::time::advance(GONE).await;
    probes.update_instances(&ids(&[&other]));
    assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(other.clone()), 2));
    let (mut to_first, mut to_other) = (Sent::default(), Sent::default());
    assert_eq!(messages(&probes, &other, &mut to_other), ["target 2 seed None"]);
    probes.result(reported(2, 5));
    // The instance that the pod belongs to is back.
    probes.update_instances(&ids(&["a", "b"]));
    assert!(matches!(place(&probes, &uid), Place::Leaving { instance, .. } if instance == other));
    assert_eq!(messages(&probes, &other, &mut to_other), ["release 2"]);
    assert_eq!(messages(&probes, &other, &mut to_other), [""; 0], "the release is sent once");
    assert_eq!(
        messages(&probes, &first, &mut to_first),
        [""; 0],
        "no instance probes the pod until the release"
    );
    let released = wire::Released { uid: "u".into(), generation: 2, memory: vec![reported(2, 7)] };
    let report = wire::drive_report::Report::Released(released);
    probes.report(wire::DriveReport { report: Some(report), trace: None });
    assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(first.clone()), 3));
    assert_eq!(messages(&probes, &first, &mut to_first), ["target 3 seed Some(7)"]);
    assert_eq!(messages(&probes, &other, &mut to_other), [""; 0]);
    probes.result(reported(2, 99));
    assert_eq!(counter(&probes, &uid), Some(7), "a lower generation is dropped");
}

#[tokio::test(start_paused = true)]
async fn a_release_without_a_reply_is_abandoned_after_two_seconds() {
    let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
    let uid = PodUid::parse("u").unwrap();
    let (first, other) = two(&probes, &uid);
    probes.update_instances(&ids(&[&other]));
    tokio::time::advance(GONE).await;
    probes.update_instances(&ids(&[&other]));
    probes.update_instances(&ids(&["a", "b"]));
    tokio::time::advance(Duration::from_millis(1900)).await;
    probes.update_instances(&ids(&["a", "b"]));
    assert!(matches!(place(&probes, &uid), Place::Leaving { .. }));
    tokio::time::advance(Duration::from_millis(200)).await;
    probes.update_instances(&ids(&["a", "b"]));
    assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(first.clone()), 3));
    // The answer comes all the same: it is of a lower generation.
    probes.released(&uid, 2);
    probes.result(reported(2, 9));
    assert_eq!((generation(&probes, &uid), counter(&probes, &uid)), (3, None));
}

#[tokio::test(start_paused = true)]
async fn an_unresponsive_instance_loses_its_pods_and_drops_them_when_it_resumes() {
    let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
    let uid = PodUid::parse("u").unwrap();
    let (first, other) = two(&probes, &uid);
    let mut to_first = Sent::default();
    assert_eq!(messages(&probes, &first, &mut to_first), ["target 1 seed None"]);
    probes.result(reported(1, 4));
    probes.silent(&first, Instant::now());
    tokio::time::advance(Duration::from_millis(1900)).await;
    probes.update_instances(&ids(&["a", "b"]));
    assert_eq!(place(&probes, &uid), Place::At(first.clone()), "the limit is 2 s");
    tokio::time::advance(Duration::from_millis(200)).await;
    probes.update_instances(&ids(&["a", "b"]));
    assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(other.clone()), 2));
    assert_eq!(messages(&probes, &other, &mut Sent::default()), ["target 2 seed Some(4)"]);
    assert_eq!(messages(&probes, &first, &mut to_first), ["remove 1"]);
    probes.result(reported(1, 50));
    assert_eq!(counter(&probes, &uid), Some(4), "a resumed instance reports a lower generation");
}

#[tokio::test(start_paused = true)]
async fn the_only_instance_keeps_its_pods_however_long_it_is_absent() {
    let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
    let uid = PodUid::parse("u").unwrap();
    probes.update_instances(&ids(&["a"]));
    probes.set_target(&uid, target()).unwrap();
    probes.update_instances(&ids(&[]));
    tokio::time::advance(GONE).await;
    probes.update_instances(&ids(&[]));
    probes.update_instances(&ids(&["a"]));
    assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At("a".to_owned()), 1));
}

#[tokio::test(start_paused = true)]
async fn an_instance_back_within_two_seconds_keeps_its_pods() {
    let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
    let both = ids(&["a", "b"]);
    let uid = PodUid::parse("u").unwrap();
    let (first, other) = two(&probes, &uid);
    let owner = || place(&probes, &uid).instance().unwrap().to_owned();
    let others = ids(&[&other]);
    probes.update_instances(&others);
    tokio::time::advance(Duration::from_millis(1900)).await;
    probes.update_instances(&both);
    assert_eq!(owner(), first);
    probes.update_instances(&others);
    tokio::time::advance(Duration::from_millis(2100)).await;
    probes.update_instances(&others);
    assert_ne!(owner(), first);
    assert_eq!(generation(&probes, &uid), 2);
}

#[tokio::test(start_paused = true)]
async fn a_target_that_is_too_large_stops_the_probes_of_its_pod_and_the_set_stays_complete() {
    let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
    let (large, good) = (PodUid::parse("large").unwrap(), PodUid::parse("good").unwrap());
    probes.update_instances(&ids(&["a"]));
    let mut sent = Sent::default();
    for uid in [&large, &good] {
        probes.set_target(uid, target()).unwrap();
    }
    assert_eq!(probes.difference("a", &mut sent).len(), 2);
    let mut huge = target();
    huge.containers[0].name = "x".repeat(quintlet_proto::limits::ITEM);
    for _ in 0..2 {
        probes.set_target(&large, huge.clone()).unwrap_err();
    }
    let removed = probes.difference("a", &mut sent);
    assert!(matches!(&removed[..], [(wire::drive_request::Request::Remove(gone), _)] if gone.uid == "large"));
    assert!(probes.difference("a", &mut sent).is_empty(), "nothing is sent again");
    probes.set_target(&large, target()).unwrap();
    assert_eq!(probes.difference("a", &mut sent).len(), 1, "the pod is probed again");
}

#[tokio::test(start_paused = true)]
async fn an_equal_target_is_neither_replaced_nor_sent_again() {
    let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
    let uid = PodUid::parse("u").unwrap();
    probes.update_instances(&ids(&["a"]));
    let mut sent = Sent::default();
    let kept = || Arc::clone(&probes.desired.read().pods[&uid].target);
    probes.set_target(&uid, target()).unwrap();
    let first = kept();
    assert_eq!(probes.difference("a", &mut sent).len(), 1);
    assert!(Arc::ptr_eq(&sent.targets[&uid], &first), "a stream shares the target");
    probes.set_target(&uid, target()).unwrap();
    assert!(Arc::ptr_eq(&kept(), &first));
    assert!(probes.difference("a", &mut sent).is_empty());
    let mut other = target();
    other.pod_ip = "10.0.0.9".to_owned();
    probes.set_target(&uid, other).unwrap();
    assert_eq!(probes.difference("a", &mut sent).len(), 1);
}
