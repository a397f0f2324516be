use std::os::unix::fs::MetadataExt as _;

use pod_sync_decisions::resize::feasibility::PendingReason;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics;
use quintlet_testkit::pods::pod_json;
use serde_json::json;

use super::*;
use crate::resize_metrics::PRIORITY_BUCKETS;

fn pod(cpu: &str) -> Arc<Pod> {
    Arc::new(pod_json(json!({"containers": [{"name": "a", "image": "i",
        "resources": {"requests": {"cpu": cpu}}}]})))
}

fn uid() -> PodUid {
    PodUid::parse("u1").unwrap()
}

fn open(dir: &tempfile::TempDir) -> Allocations {
    let state_dir = dir.path().join("state");
    std::fs::create_dir_all(&state_dir).unwrap();
    Allocations::open(dir.path(), &state_dir, true)
}

fn inode(dir: &tempfile::TempDir, file: &str) -> Option<u64> {
    std::fs::metadata(dir.path().join(file)).map(|meta| meta.ino()).ok()
}

#[test]
fn the_applied_size_limit_of_a_volume_is_kept_until_its_resize_is_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let pod = |limit: &str| {
        let volume = json!({"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": limit}});
        pod_json(json!({"containers": [{"name": "a", "image": "i"}], "volumes": [volume]}))
    };
    let limit = |all: &Allocations| all.actuated(&uid()).map(|a| a.size_limits["v"].0.clone());
    let all = open(&dir);
    // From a time at which the feature gate was off.
    all.state
        .lock()
        .allocated
        .change(&uid(), |entry| entry.pod_level = Some(ResourceRequirements::default()));
    all.recover(&uid(), &pod("1Mi"), None);
    assert_eq!(limit(&all), None, "mounted with its allocated limit");
    for allocated in ["2Mi", "3Mi"] {
        all.allocate(&uid(), &pod(allocated));
        assert_eq!(limit(&all).as_deref(), Some("1Mi"));
    }
    all.actuate_volume(&uid(), "v", Quantity("3Mi".to_owned()));
    assert_eq!(limit(&all).as_deref(), Some("3Mi"));
    let off = Allocations::open(dir.path(), &dir.path().join("off"), false);
    assert!(off.resources_of(&pod("1Mi")).size_limits.is_empty(), "the feature gate is off");
}

#[test]
fn an_outdated_pod_does_not_complete_a_newer_resize() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&dir);
    let (before, after) = (pod("1"), pod("2"));
    all.allocate(&uid(), &before);
    all.allocate(&uid(), &after);
    all.conditions(&uid(), |c| c.set_in_progress(Some(2), jiff::Timestamp::UNIX_EPOCH));
    assert_eq!(all.complete(&uid(), &before), None, "observed before the allocation");
    assert_eq!(all.condition_list(&uid()).len(), 1);
    assert_eq!(all.complete(&uid(), &after).unwrap().observed_generation, Some(2));
    assert!(all.condition_list(&uid()).is_empty());
    assert_eq!(all.complete(&uid(), &after), None, "it completes once");
}

#[tokio::test]
async fn allocated_and_actuated_resources_survive_a_restart_until_the_pod_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&dir);
    assert!(!all.is_allocated(&uid()));
    all.allocate(&uid(), &pod("1"));
    all.actuate(&uid(), "a", allocation::of_pod(&pod("500m")).containers["a"].clone());
    all.flush().await;

    let again = open(&dir);
    assert_eq!(again.apply(&uid(), &pod("2")), pod("1"));
    assert_eq!(again.actuated(&uid()), Some(allocation::of_pod(&pod("500m"))));
    again.retain(&["u1"].into());
    again.remove(&uid());
    again.flush().await;
    let last = open(&dir);
    assert!(!last.is_allocated(&uid()) && last.actuated(&uid()).is_none());
    last.allocate(&uid(), &pod("1"));
    last.flush().await;
    last.retain(&HashSet::new());
    last.flush().await;
    assert!(!open(&dir).is_allocated(&uid()), "the pod is not known");
}

#[tokio::test]
async fn changes_are_recorded_in_a_journal_until_the_files_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&dir);
    let uids: Vec<PodUid> = (0..100).map(|n| PodUid::parse(&format!("u{n}")).unwrap()).collect();
    for uid in &uids {
        all.allocate(uid, &pod("1"));
        all.flush().await;
    }
    assert_eq!(inode(&dir, ALLOCATED), None, "the file is not written for each change");
    let again = open(&dir);
    assert!(uids.iter().all(|uid| again.is_allocated(uid)), "the journal has all changes");
    assert!(again.begin_interval(Duration::ZERO), "the file still lacks them");
    again.write_files().await;
    let first = inode(&dir, ALLOCATED).unwrap();
    assert_eq!(inode(&dir, ACTUATED), None, "that file has not changed");
    again.write_files().await;
    assert_eq!(inode(&dir, ALLOCATED), Some(first), "a write without changes writes nothing");

    again.allocate(&uids[0], &pod("2"));
    again.remove(&uids[1]);
    again.flush().await;
    let last = open(&dir);
    assert_eq!(last.apply(&uids[0], &pod("1")), pod("2"));
    assert!(!last.is_allocated(&uids[1]) && last.is_allocated(&uids[2]));
    assert_eq!(inode(&dir, ALLOCATED), Some(first));
}

#[tokio::test]
async fn a_file_that_another_program_wrote_is_used_without_the_journal() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&dir);
    all.allocate(&uid(), &pod("1"));
    all.write_files().await;
    all.allocate(&uid(), &pod("2"));
    all.flush().await;
    let others: PodResourceEntries = [("u1".to_owned(), allocation::of_pod(&pod("3")))].into();
    std::fs::write(dir.path().join(ALLOCATED), checkpoint::encode(&others).unwrap()).unwrap();
    assert_eq!(open(&dir).apply(&uid(), &pod("1")), pod("3"));
}

#[tokio::test]
async fn each_change_is_written_to_the_file_if_there_is_no_journal() {
    let dir = tempfile::tempdir().unwrap();
    let all = Allocations::open(dir.path(), &dir.path().join("missing"), true);
    for cpu in ["1", "2"] {
        all.allocate(&uid(), &pod(cpu));
        all.flush().await;
        let file = std::fs::read(dir.path().join(ALLOCATED)).unwrap();
        assert_eq!(checkpoint::decode(&file).unwrap()["u1"], allocation::of_pod(&pod(cpu)));
    }
    std::fs::create_dir(dir.path().join("missing")).unwrap();
    all.allocate(&uid(), &pod("3"));
    all.flush().await;
    let first = inode(&dir, ALLOCATED);
    all.allocate(&uid(), &pod("4"));
    all.flush().await;
    assert_eq!(inode(&dir, ALLOCATED), first, "there is a journal again");
    let again = Allocations::open(dir.path(), &dir.path().join("missing"), true);
    assert_eq!(again.apply(&uid(), &pod("1")), pod("4"));
}

#[test]
fn files_are_due_at_most_once_per_interval() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&dir);
    let began = Duration::from_secs(100);
    assert!(!all.begin_interval(began), "nothing has changed");
    all.allocate(&uid(), &pod("1"));
    assert!(all.begin_interval(began));
    assert!(!all.begin_interval(began + WRITE_INTERVAL - Duration::from_millis(1)));
    let under_way = all.writing.try_lock().unwrap();
    assert!(!all.begin_interval(began + WRITE_INTERVAL), "a write is under way");
    drop(under_way);
    assert!(all.begin_interval(began + WRITE_INTERVAL));
}

#[test]
fn resizes_are_counted_by_state() {
    use pod_sync_decisions::resize::feasibility::PendingResize;
    let dir = tempfile::tempdir().unwrap();
    let mut all = open(&dir);
    // Not those of the process, which other tests change too.
    all.metrics.pending = Family::default();
    all.metrics.in_progress = Gauge::default();
    let counted = || {
        let pending = |label| {
            let labels = |bucket| [("reason", label), ("priority_bucket", bucket)];
            PRIORITY_BUCKETS
                .map(|bucket| all.metrics.pending.get_or_create(&labels(bucket)).get())
                .iter()
                .sum::<i64>()
        };
        (pending("deferred"), pending("infeasible"), all.metrics.in_progress.get())
    };
    let now = jiff::Timestamp::UNIX_EPOCH;
    let wait = |name: &str, reason| {
        let pending = PendingResize { reason, cause: String::new(), message: String::new(), detail: "" };
        all.conditions(&PodUid::parse(name).unwrap(), |c| c.set_pending(&pending, None, now));
    };
    wait("u1", PendingReason::Deferred);
    wait("u2", PendingReason::Deferred);
    wait("u3", PendingReason::Infeasible);
    assert_eq!(counted(), (2, 1, 0));
    all.conditions(&uid(), |c| c.set_priority(7));
    let high = [("reason", "deferred"), ("priority_bucket", "high")];
    assert_eq!((counted(), all.metrics.pending.get_or_create(&high).get()), ((2, 1, 0), 1));
    all.conditions(&uid(), |c| c.set_in_progress(None, now));
    assert_eq!(counted(), (1, 1, 1), "one was allocated");
    all.conditions(&uid(), ResizeConditions::clear_in_progress);
    all.retain(&["u1", "u2"].into());
    assert_eq!(counted(), (1, 0, 0));
    all.remove(&PodUid::parse("u2").unwrap());
    assert_eq!(counted(), (0, 0, 0));
}

#[test]
fn the_time_of_a_deferred_resize_is_recorded_with_its_end() {
    use pod_sync_decisions::resize::feasibility::PendingResize;
    let all = open(&tempfile::tempdir().unwrap());
    let at = |seconds| jiff::Timestamp::from_second(seconds).unwrap();
    for (name, priority, reason, end, bucket) in [
        ("u1", 2_000_001_000, PendingReason::Deferred, DeferralEnd::Accepted, "system"),
        ("u2", 1, PendingReason::Deferred, DeferralEnd::Reverted, "high"),
        ("u3", -1, PendingReason::Deferred, DeferralEnd::Terminated, "low"),
        ("u4", 0, PendingReason::Infeasible, DeferralEnd::Reverted, "default"),
    ] {
        let uid = PodUid::parse(name).unwrap();
        let pending = PendingResize { reason, cause: String::new(), message: String::new(), detail: "" };
        all.conditions(&uid, |c| {
            c.set_priority(priority);
            c.set_pending(&pending, None, at(100))
        });
        let series = format!(
            "kubelet_pod_deferred_resize_duration_seconds_sum{{priority_bucket=\"{bucket}\",resolution=\"{}\"}} ",
            end.as_str()
        );
        let sum = || {
            let text = metrics::text();
            text.lines().find_map(|l| l.strip_prefix(&series)?.parse::<f64>().ok()).unwrap_or(0.0)
        };
        let before = sum();
        all.deferral_ended(&uid, end, at(142));
        let want = if reason == PendingReason::Deferred { 42.0 } else { 0.0 };
        assert!((sum() - before - want).abs() < 0.001, "{series}{} {}", before, sum());
    }
}

#[tokio::test]
async fn a_checkpoint_is_written_only_if_it_changed() {
    let dir = tempfile::tempdir().unwrap();
    let all = open(&dir);
    all.allocate(&uid(), &pod("1"));
    all.write_files().await;
    let file = dir.path().join(ALLOCATED);
    std::fs::remove_file(&file).unwrap();
    all.allocate(&uid(), &pod("1"));
    all.write_files().await;
    assert!(!file.exists());
    all.allocate(&uid(), &pod("2"));
    all.write_files().await;
    assert!(file.exists());
}

#[tokio::test]
async fn an_unusable_checkpoint_is_moved_aside_and_the_status_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let before = open(&dir);
    before.allocate(&uid(), &pod("1"));
    before.write_files().await;
    let file = dir.path().join(ALLOCATED);
    let good = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, good.replace("u1", "u2")).unwrap();
    let all = open(&dir);
    assert!(!all.is_allocated(&uid()) && !file.exists());
    assert!(dir.path().join("allocated_pods_state.corrupt").exists());

    let status = serde_json::from_value(json!({"containerStatuses": [{
        "name": "a", "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "allocatedResources": {"cpu": "1"}}],
        "conditions": [{"type": "PodResizePending", "status": "True", "reason": "Deferred"}]}))
    .unwrap();
    all.recover(&uid(), &pod("2"), Some(&status));
    assert_eq!(all.apply(&uid(), &pod("2")), pod("1"));
    assert_eq!(all.condition_list(&uid()).len(), 1);
    all.allocate(&uid(), &pod("2"));
    all.recover(&uid(), &pod("2"), Some(&status));
    assert_eq!(all.apply(&uid(), &pod("2")), pod("2"), "what is known counts more");
}
