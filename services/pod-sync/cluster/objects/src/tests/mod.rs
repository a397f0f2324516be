//! The three strategies against an API server in memory, in paused time.

mod api;
mod properties;

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use parking_lot::Mutex;
use pod_sync_clients::WorkerWakeups;
use quintlet_model::ids::PodUid;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::api::{FakeApi, Fault};
use crate::watched::{MAX_WATCHED_PER_POD, MAX_WATCHES};
use crate::{ChangeDetectionStrategy, ObjectCache, ObjectCacheSettings};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

struct Node {
    api: FakeApi,
    cache: Arc<ObjectCache>,
    wakes: Arc<WorkerWakeups>,
    ttl: Arc<Mutex<Option<Duration>>>,
}

impl Node {
    fn with(strategy: ChangeDetectionStrategy, sync_frequency: Duration) -> Self {
        let api = FakeApi::default();
        let wakes = Arc::default();
        let ttl = Arc::<Mutex<_>>::default();
        let of_node = Arc::clone(&ttl);
        let node_ttl = Arc::new(move || *of_node.lock());
        let settings = ObjectCacheSettings { strategy, sync_frequency, node_ttl };
        let cache = ObjectCache::new(&api.client(), &settings, Arc::clone(&wakes), &CancellationToken::new());
        Self { api, cache: Arc::new(cache), wakes, ttl }
    }

    fn new() -> Self {
        Self::with(ChangeDetectionStrategy::Watch, MINUTE)
    }

    fn register(&self, uid: &str, config_maps: &[&str]) {
        self.cache.register(&PodUid::parse(uid).unwrap(), &pod(config_maps), |_, _| false);
    }

    fn unregister(&self, uid: &str) {
        self.cache.unregister(&PodUid::parse(uid).unwrap());
    }

    async fn read(&self, name: &str) -> Result<String, String> {
        let read = self.cache.config_map("default", name).await;
        read.map(|map| map.data.clone().unwrap()["k"].clone()).map_err(|e| e.to_string())
    }

    fn changes(&self, uid: &str) -> u64 {
        self.cache.changes(&PodUid::parse(uid).unwrap())
    }
}

fn pod(config_maps: &[&str]) -> Arc<Pod> {
    let sources: Vec<_> = config_maps.iter().map(|name| json!({"configMapRef": {"name": name}})).collect();
    let pod = json!({
        "metadata": {"namespace": "default"},
        "spec": {"containers": [{"name": "c", "envFrom": sources}]},
    });
    Arc::new(serde_json::from_value(pod).unwrap())
}

async fn after(wait: Duration) {
    tokio::time::sleep(wait).await;
}

#[tokio::test(start_paused = true)]
async fn pods_of_one_object_share_one_list_and_one_watch() {
    let node = Node::new();
    node.api.put("configmaps/root", "1", false);
    for pod in 0..100 {
        node.register(&format!("p{pod}"), &["root"]);
        assert_eq!(node.read("root").await.as_deref(), Ok("1"));
    }
    after(SECOND).await;
    assert_eq!(node.api.requests("list configmaps/root"), 1);
    assert_eq!(node.api.requests("watch configmaps/root"), 1);
    assert_eq!(node.api.all_requests(), 2);
    for pod in 0..99 {
        node.unregister(&format!("p{pod}"));
    }
    after(SECOND).await;
    assert_eq!(node.api.watched().len(), 1);
    node.unregister("p99");
    after(SECOND).await;
    assert_eq!(node.api.watched().len(), 0);
    assert_eq!(node.read("root").await, Err("object \"default\"/\"root\" not registered".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_pod_with_very_many_objects_has_no_watches_and_reads_its_objects_all_the_same() {
    let node = Node::new();
    let names: Vec<String> = (0..=MAX_WATCHED_PER_POD).map(|n| format!("m{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    node.api.put("configmaps/m0", "1", false);
    node.register("greedy", &names);
    node.register("other", &["own"]);
    assert_eq!(node.read("m0").await.as_deref(), Ok("1"));
    assert_eq!(node.read("m1").await, Err("configmap \"m1\" not found".to_owned()));
    assert_eq!(node.api.watched().len(), 1, "that of the other pod");
    node.api.put("configmaps/m0", "2", false);
    after(2 * MINUTE).await;
    assert_eq!(node.read("m0").await.as_deref(), Ok("2"), "its time to live has elapsed");
    node.unregister("greedy");
    assert_eq!(node.read("m0").await, Err("object \"default\"/\"m0\" not registered".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn an_object_without_a_watch_is_read_again_by_each_sync_and_for_each_new_pod() {
    let node = Node::new();
    let names: Vec<String> = (0..=MAX_WATCHED_PER_POD).map(|n| format!("m{n}")).collect();
    let greedy = pod(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let sync = |uid: &str| node.cache.register(&PodUid::parse(uid).unwrap(), &greedy, |_, _| false);
    node.api.put("configmaps/m0", "1", false);
    sync("p1");
    for _ in 0..2 {
        assert_eq!(node.read("m0").await.as_deref(), Ok("1"));
    }
    let gets = || node.api.requests("get configmaps/m0");
    assert_eq!(gets(), 1, "one request in a sync");
    node.api.put("configmaps/m0", "2", false);
    assert_eq!(node.read("m0").await.as_deref(), Ok("1"));
    sync("p1");
    assert_eq!(
        node.read("m0").await.as_deref(),
        Ok("2"),
        "a container that starts again has the new version"
    );
    node.api.put("configmaps/m0", "3", false);
    sync("p2");
    assert_eq!(node.read("m0").await.as_deref(), Ok("3"), "another pod has the new version");
    sync("p1");
    node.api.fail("*", Fault::Refused);
    assert_eq!(node.read("m0").await.as_deref(), Ok("3"), "the last version stands in");
    node.api.heal();
    node.api.put("configmaps/m0", "4", false);
    assert_eq!(node.read("m0").await.as_deref(), Ok("4"), "a failed request does not count");
    assert_eq!(node.api.watched().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn no_more_objects_are_watched_than_there_are_connections_for() {
    let node = Node::new();
    let pods = MAX_WATCHES / MAX_WATCHED_PER_POD;
    for pod in 0..pods {
        let names: Vec<String> = (0..MAX_WATCHED_PER_POD).map(|n| format!("m{pod}-{n}")).collect();
        node.register(&format!("p{pod}"), &names.iter().map(String::as_str).collect::<Vec<_>>());
    }
    node.api.put("configmaps/late", "1", false);
    node.register("late", &["late"]);
    after(SECOND).await;
    assert_eq!(node.api.watched().len(), MAX_WATCHES);
    assert_eq!(node.read("late").await.as_deref(), Ok("1"), "read without a watch");
    assert_eq!(node.api.watched().len(), MAX_WATCHES);
    node.unregister("p0");
    after(SECOND).await;
    assert_eq!(node.read("late").await.as_deref(), Ok("1"));
    after(SECOND).await;
    assert!(node.api.watched().iter().any(|key| key.contains("late")), "a watch has become free");
}

#[tokio::test(start_paused = true)]
async fn a_change_wakes_the_pods_that_refer_to_the_object_and_no_others() {
    let node = Node::new();
    node.api.put("configmaps/a", "1", false);
    let bells: Vec<_> =
        ["p1", "p2", "p3"].map(|uid| node.wakes.register(&PodUid::parse(uid).unwrap())).into();
    node.register("p1", &["a"]);
    node.register("p2", &["b"]);
    node.register("p3", &["a", "b"]);
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    let rung = || bells.iter().map(|bell| bell.notified().now_or_never().is_some()).collect::<Vec<_>>();
    after(SECOND).await;
    assert_eq!(rung(), [false; 3], "the first list is no change");
    node.api.put("configmaps/a", "2", false);
    let began = Instant::now();
    bells[0].notified().await;
    assert!(began.elapsed() < Duration::from_millis(10), "{:?}", began.elapsed());
    assert_eq!(node.read("a").await.as_deref(), Ok("2"));
    assert_eq!(rung(), [false, false, true]);
    assert_eq!(["p1", "p2", "p3"].map(|uid| node.changes(uid)), [1, 0, 1]);
    after(SECOND).await;
    node.api.delete("configmaps/a");
    after(SECOND).await;
    assert_eq!(rung(), [true, false, true]);
    assert_eq!(node.read("a").await, Err("configmap \"a\" not found".to_owned()));
    node.api.put("configmaps/b", "1", false);
    after(SECOND).await;
    assert_eq!(rung(), [false, true, true], "it did not exist before");
    assert_eq!(node.read("b").await.as_deref(), Ok("1"));
}

#[tokio::test(start_paused = true)]
async fn secrets_are_watched_as_config_maps_are() {
    let node = Node::new();
    node.api.put("secrets/s", "1", true);
    let uid = PodUid::parse("p").unwrap();
    let pod = json!({"metadata": {"namespace": "default"},
        "spec": {"containers": [], "imagePullSecrets": [{"name": "s"}, {"name": "none"}]}});
    let pod = Arc::new(serde_json::from_value(pod).unwrap());
    node.cache.register(&uid, &pod, |_, _| false);
    let secret = node.cache.secret("default", "s").await.unwrap();
    assert_eq!(secret.metadata.managed_fields, None, "nobody reads them");
    let error = node.cache.secret("default", "none").await.unwrap_err();
    assert_eq!(error.to_string(), "secret \"none\" not found");
    after(SECOND).await;
    assert_eq!(node.api.watched().into_iter().collect::<Vec<_>>(), ["secrets/none"], "s is immutable");
}

#[tokio::test(start_paused = true)]
async fn a_read_waits_a_second_for_the_first_list() {
    for (fault, text) in [
        (Fault::Silent, "failed to sync configmap cache: timed out waiting for the condition"),
        (Fault::Forbidden, "failed to sync configmap cache: timed out waiting for the condition"),
        (Fault::Refused, "failed to sync configmap cache: timed out waiting for the condition"),
    ] {
        let node = Node::new();
        node.api.put("configmaps/a", "1", false);
        node.api.put("configmaps/b", "1", false);
        node.api.fail("configmaps/a", fault);
        node.register("p", &["a", "b"]);
        let began = Instant::now();
        assert_eq!(node.read("a").await, Err(text.to_owned()), "{fault:?}");
        assert_eq!(began.elapsed(), SECOND, "{fault:?}");
        assert_eq!(node.read("b").await.as_deref(), Ok("1"), "{fault:?}");
        assert_eq!(began.elapsed(), SECOND, "another object does not wait, {fault:?}");
        assert_eq!(node.changes("p"), 0);
        node.api.heal();
        after(2 * MINUTE).await;
        assert_eq!(node.read("a").await.as_deref(), Ok("1"), "{fault:?}");
        assert_eq!(node.changes("p"), 1, "a read failed, so the first list is a change, {fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_because_the_server_does_not_have_the_pod_yet_does_not_fail_a_read() {
    let node = Node::new();
    node.api.put("configmaps/a", "1", false);
    node.api.refuse(4);
    node.register("p", &["a"]);
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    assert_eq!(node.api.requests("list configmaps/a"), 5);
}

#[tokio::test(start_paused = true)]
async fn an_immutable_object_is_not_watched_again_after_it_was_read() {
    let node = Node::new();
    node.api.put("configmaps/a", "1", true);
    node.register("p1", &["a"]);
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    after(SECOND).await;
    assert_eq!(node.api.watched().len(), 0);
    let requests = node.api.all_requests();
    node.api.delete("configmaps/a");
    node.api.put("configmaps/a", "2", true);
    node.register("p2", &["a"]);
    node.unregister("p1");
    after(10 * MINUTE).await;
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    assert_eq!(node.api.all_requests(), requests);
    node.unregister("p2");
    node.register("p3", &["a"]);
    assert_eq!(node.read("a").await.as_deref(), Ok("2"), "it was not referenced meanwhile");
}

#[tokio::test(start_paused = true)]
async fn an_object_that_becomes_immutable_is_not_watched_after_its_next_read() {
    let node = Node::new();
    node.api.put("configmaps/a", "1", false);
    node.register("p", &["a"]);
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    node.api.put("configmaps/a", "2", true);
    after(SECOND).await;
    assert_eq!(node.api.watched().len(), 1, "nobody has read it");
    assert_eq!(node.read("a").await.as_deref(), Ok("2"));
    after(SECOND).await;
    assert_eq!(node.api.watched().len(), 0);
    assert_eq!(node.changes("p"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_watch_without_reads_ends_after_five_sync_periods_and_a_read_starts_it_again() {
    // Sync period, and the time without a read after which the watch still runs, and has ended.
    for (sync_frequency, lives, ends) in [(MINUTE, 5, 7), (SECOND, 1, 3), (10 * MINUTE, 50, 52)] {
        let node = Node::with(ChangeDetectionStrategy::Watch, sync_frequency);
        let stop = CancellationToken::new();
        let recycling =
            quintlet_kit::task::spawn("idle", Arc::clone(&node.cache).stop_idle_watches(stop.clone()));
        node.api.put("configmaps/a", "1", false);
        node.register("p", &["a"]);
        assert_eq!(node.read("a").await.as_deref(), Ok("1"));
        after(lives * MINUTE).await;
        assert_eq!(node.api.watched().len(), 1, "{sync_frequency:?}");
        after((ends - lives) * MINUTE).await;
        assert_eq!(node.api.watched().len(), 0, "{sync_frequency:?}");
        node.api.put("configmaps/a", "2", false);
        after(MINUTE).await;
        assert_eq!(node.changes("p"), 0);
        assert_eq!(node.read("a").await.as_deref(), Ok("2"));
        after(SECOND).await;
        assert_eq!((node.changes("p"), node.api.watched().len()), (1, 1));
        stop.cancel();
        recycling.await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_version_is_read_while_the_server_is_away_and_the_new_one_soon_after() {
    let node = Node::new();
    let names: Vec<String> = (0..50).map(|n| format!("m{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for name in &names {
        node.api.put(&format!("configmaps/{name}"), "1", false);
    }
    node.register("p", &names);
    for name in &names {
        assert_eq!(node.read(name).await.as_deref(), Ok("1"));
    }
    let before = node.api.all_requests();
    node.api.fail("*", Fault::Refused);
    node.api.break_watches();
    let away = Instant::now();
    after(10 * MINUTE).await;
    let read = Instant::now();
    for name in &names {
        assert_eq!(node.read(name).await.as_deref(), Ok("1"));
    }
    assert_eq!(read.elapsed(), Duration::ZERO, "no read waits");
    let attempts = node.api.all_requests() - before;
    // One attempt a second by one watch, and one each in 30 s and more by the others.
    let most = away.elapsed().as_secs() as usize * 2 + 50 * (10 * 2 + 6);
    assert!((500..most).contains(&attempts), "{attempts} attempts, at most {most}");
    for name in &names {
        node.api.put(&format!("configmaps/{name}"), "2", false);
    }
    node.api.heal();
    after(3 * SECOND).await;
    for name in &names {
        assert_eq!(node.read(name).await.as_deref(), Ok("2"), "{name}");
        assert_eq!(node.api.requests(&format!("list configmaps/{name}")), 1, "the watch continues");
    }
    assert!(node.changes("p") >= 50);
}

#[tokio::test(start_paused = true)]
async fn an_expired_watch_lists_again_and_notices_what_changed_meanwhile() {
    for expires_in_stream in [true, false] {
        let node = Node::new();
        for name in ["changed", "deleted", "same"] {
            node.api.put(&format!("configmaps/{name}"), "1", false);
        }
        for (uid, name) in [("p1", "changed"), ("p2", "deleted"), ("p3", "same"), ("p4", "new")] {
            node.register(uid, &[name]);
            let _ = node.read(name).await;
        }
        after(MINUTE).await;
        if expires_in_stream {
            // The watches do not see the changes.
            node.api.fail("*", Fault::Refused);
            node.api.break_watches();
            after(MINUTE).await;
        } else {
            node.api.fail("*", Fault::Silent);
            node.api.expire_watches();
            after(SECOND).await;
        }
        node.api.put("configmaps/changed", "2", false);
        node.api.delete("configmaps/deleted");
        node.api.put("configmaps/new", "1", false);
        node.api.compact();
        assert_eq!(node.read("changed").await.as_deref(), Ok("1"), "the last version stays meanwhile");
        node.api.heal();
        after(3 * MINUTE).await;
        assert_eq!(node.read("changed").await.as_deref(), Ok("2"));
        assert_eq!(node.read("deleted").await, Err("configmap \"deleted\" not found".to_owned()));
        assert_eq!(node.read("same").await.as_deref(), Ok("1"));
        assert_eq!(node.read("new").await.as_deref(), Ok("1"));
        assert_eq!(["p1", "p2", "p3", "p4"].map(|uid| node.changes(uid)), [1, 1, 0, 1]);
        assert_eq!(node.api.watched().len(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_the_server_closes_continues_without_a_list() {
    let node = Node::new();
    node.api.put("configmaps/a", "1", false);
    node.register("p", &["a"]);
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    after(MINUTE).await;
    for round in 2..5 {
        node.api.close_watches();
        node.api.put("configmaps/a", "2", false);
        after(MINUTE).await;
        assert_eq!(node.api.requests("watch configmaps/a"), round);
    }
    assert_eq!(node.api.requests("list configmaps/a"), 1);
    assert_eq!(node.read("a").await.as_deref(), Ok("2"));
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_are_not_repeated_in_a_loop() {
    let node = Node::new();
    node.api.put("configmaps/a", "1", false);
    node.api.fail("*", Fault::ShortWatches);
    node.register("p", &["a"]);
    after(10 * MINUTE).await;
    let watches = node.api.requests("watch configmaps/a");
    assert!((12..=30).contains(&watches), "{watches}");
    assert_eq!(node.api.requests("list configmaps/a"), 1);
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
}

#[tokio::test(start_paused = true)]
async fn an_object_that_is_written_in_a_loop_wakes_its_pods_ten_times_a_second_and_after_the_last_write() {
    let node = Node::new();
    node.api.put("configmaps/a", "0", false);
    node.register("p", &["a"]);
    assert_eq!(node.read("a").await.as_deref(), Ok("0"));
    let (mut last, mut seen) = (0, 0);
    for write in 1..=1000 {
        node.api.put("configmaps/a", &write.to_string(), false);
        after(Duration::from_millis(1)).await;
        let read: u32 = node.read("a").await.unwrap().parse().unwrap();
        assert!(read >= last, "{read} after {last}");
        last = read;
        if node.changes("p") > seen {
            seen = node.changes("p");
        }
    }
    assert!((9..=11).contains(&seen), "{seen}");
    after(Duration::from_millis(150)).await;
    assert_eq!(node.read("a").await.as_deref(), Ok("1000"));
    assert_eq!(node.changes("p"), seen + 1, "the last write is reported");
}

#[tokio::test(start_paused = true)]
async fn an_object_that_another_source_has_is_watched_from_its_first_read_on() {
    let node = Node::new();
    node.api.put("configmaps/a", "1", false);
    node.cache.register(&PodUid::parse("p").unwrap(), &pod(&["a"]), |_, name| name == "a");
    after(MINUTE).await;
    assert_eq!(node.api.all_requests(), 0);
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    after(SECOND).await;
    assert_eq!(node.api.watched().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_cached_object_is_read_again_after_its_time_to_live_and_for_a_new_pod() {
    let node = Node::with(ChangeDetectionStrategy::Cache, MINUTE);
    node.api.put("configmaps/a", "1", false);
    assert_eq!(node.read("a").await, Err("object \"default\"/\"a\" not registered".to_owned()));
    node.register("p1", &["a"]);
    let gets = || node.api.requests("get configmaps/a");
    for _ in 0..3 {
        assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    }
    assert_eq!(gets(), 1);
    node.api.put("configmaps/a", "2", false);
    after(MINUTE - SECOND).await;
    assert_eq!(node.read("a").await.as_deref(), Ok("1"));
    after(SECOND).await;
    assert_eq!((node.read("a").await.as_deref(), gets()), (Ok("2"), 2), "the default is a minute");
    *node.ttl.lock() = Some(10 * SECOND);
    after(9 * SECOND).await;
    assert_eq!((node.read("a").await.as_deref(), gets()), (Ok("2"), 2));
    after(SECOND).await;
    assert_eq!((node.read("a").await.as_deref(), gets()), (Ok("2"), 3), "the Node says ten seconds");
    *node.ttl.lock() = Some(Duration::ZERO);
    assert_eq!((node.read("a").await.as_deref(), gets()), (Ok("2"), 4));
    *node.ttl.lock() = None;
    node.register("p2", &["a"]);
    assert_eq!((node.read("a").await.as_deref(), gets()), (Ok("2"), 5), "a pod was added");
    node.unregister("p1");
    assert_eq!((node.read("a").await.as_deref(), gets()), (Ok("2"), 5));
    after(MINUTE).await;
    node.api.fail("*", Fault::Refused);
    assert_eq!(node.read("a").await.as_deref(), Ok("2"), "the last version stands in");
    node.api.heal();
    node.api.delete("configmaps/a");
    assert_eq!(node.read("a").await, Err("configmap \"a\" not found".to_owned()));
    node.api.fail("*", Fault::Refused);
    assert_eq!(node.read("a").await, Err("configmap \"a\" not found".to_owned()));
    node.api.heal();
    node.api.put("configmaps/a", "3", false);
    assert_eq!(node.read("a").await.as_deref(), Ok("3"), "an error is not cached");
    node.unregister("p2");
    assert_eq!(node.read("a").await, Err("object \"default\"/\"a\" not registered".to_owned()));
    assert_eq!(node.changes("p1"), 0);
}

#[tokio::test(start_paused = true)]
async fn concurrent_reads_of_a_cached_object_are_one_request() {
    let node = Node::with(ChangeDetectionStrategy::Cache, MINUTE);
    node.api.put("configmaps/a", "1", false);
    node.register("p", &["a"]);
    let reads = futures::future::join_all((0..20).map(|_| node.read("a"))).await;
    assert!(reads.iter().all(|read| read.as_deref() == Ok("1")), "{reads:?}");
    assert_eq!(node.api.all_requests(), 1);
}

#[tokio::test(start_paused = true)]
async fn every_read_by_get_is_a_request_with_the_words_of_the_server() {
    let node = Node::with(ChangeDetectionStrategy::Get, MINUTE);
    node.api.put("configmaps/a", "1", false);
    for read in 1..4 {
        assert_eq!(node.read("a").await.as_deref(), Ok("1"));
        assert_eq!(node.api.requests("get configmaps/a"), read);
    }
    assert_eq!(node.read("none").await, Err("configmap \"none\" not found".to_owned()));
    node.api.fail("*", Fault::Forbidden);
    assert_eq!(node.read("a").await, Err("configmaps/a is forbidden".to_owned()));
    node.api.fail("*", Fault::Silent);
    assert_eq!(node.read("a").await, Err("the API server did not answer within 10s".to_owned()));
}
