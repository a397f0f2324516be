use std::collections::BTreeSet;
use std::io::Read as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use parking_lot::Mutex;
use quintlet_kit::contain;
use quintlet_model::ids::PodUid;
use quintlet_model::outcome::Outcome;

use super::links::{Link, make, remove_broken};
use super::rotate::{make_room, plan};
use super::*;

fn names(list: &[&str]) -> BTreeSet<String> {
    list.iter().map(|n| (*n).to_owned()).collect()
}

#[test]
fn the_newest_stay_compressed_and_remains_go() {
    for (there, keep, delete, compress) in [
        (&[][..], 3, &[][..], &[][..]),
        (&["l.1", "l.2"], 3, &[], &["l.1", "l.2"]),
        (&["l.1.gz", "l.2.gz", "l.3.gz", "l.4"], 3, &["l.1.gz"], &["l.4"]),
        // Interrupted during compression: a partial file exists beside the complete one.
        (&["l.1", "l.1.tmp"], 3, &["l.1.tmp"], &["l.1"]),
        // Interrupted between compression and deletion.
        (&["l.1", "l.1.gz"], 3, &["l.1"], &[]),
        // Two files in total leave room for one rotated file, which the next rotation creates.
        (&["l.1", "l.2.gz"], 0, &["l.1", "l.2.gz"], &[]),
    ] {
        let p = plan(&names(there), keep);
        assert_eq!(
            (p.delete, p.compress),
            (
                delete.iter().map(|s| (*s).to_owned()).collect(),
                compress.iter().map(|s| (*s).to_owned()).collect()
            ),
            "{there:?}"
        );
    }
}

#[test]
fn a_compressed_log_keeps_its_content_and_mode() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("0.log");
    let old = dir.path().join("0.log.20260101-000000");
    std::fs::write(&old, "one\ntwo\n").unwrap();
    std::fs::set_permissions(&old, std::fs::Permissions::from_mode(0o640)).unwrap();
    std::fs::write(dir.path().join("10.log.20260101-000000"), "of another instance").unwrap();
    make_room(&Dir::open(dir.path()).unwrap(), &log, 1).unwrap();
    let gz = dir.path().join("0.log.20260101-000000.gz");
    let mut text = String::new();
    flate2::read::GzDecoder::new(std::fs::File::open(&gz).unwrap()).read_to_string(&mut text).unwrap();
    assert_eq!(text, "one\ntwo\n");
    assert_eq!(std::fs::metadata(&gz).unwrap().permissions().mode() & 0o777, 0o640);
    assert!(!old.exists());
    assert!(dir.path().join("10.log.20260101-000000").exists(), "another log is not touched");
}

#[test]
fn a_planted_link_is_not_followed() {
    let temp = tempfile::tempdir().unwrap();
    let (logs, host) = (temp.path().join("logs"), temp.path().join("host"));
    std::fs::create_dir_all(logs.join("pod")).unwrap();
    std::fs::create_dir(&host).unwrap();
    std::fs::write(host.join("passwd"), "root").unwrap();
    let (old, dir) = ("0.log.20260101-000000", Dir::open(&logs).unwrap());
    let log = logs.join("pod/0.log");
    std::fs::write(logs.join("pod").join(old), "text").unwrap();
    symlink(host.join("passwd"), logs.join("pod").join(format!("{old}.tmp"))).unwrap();
    symlink(host.join("passwd"), logs.join("pod/0.log.20260101-000001")).unwrap();
    make_room(&dir, &log, 3).unwrap();
    assert_eq!(std::fs::read_to_string(host.join("passwd")).unwrap(), "root");
    let gz = logs.join("pod").join(format!("{old}.gz"));
    assert!(std::fs::symlink_metadata(&gz).unwrap().is_file());
    assert!(!logs.join("pod/0.log.20260101-000001.gz").exists(), "what a link leads to is not compressed");

    std::fs::write(host.join("0.log"), "x".repeat(100)).unwrap();
    symlink(&host, logs.join("linked")).unwrap();
    symlink(host.join("0.log"), logs.join("pod/1.log")).unwrap();
    for path in [logs.join("linked/0.log"), logs.join("pod/1.log"), host.join("0.log")] {
        assert!(rotate::size(&dir, &path).is_err(), "{}", path.display());
    }
    assert!(make_room(&dir, &logs.join("linked/0.log"), 0).is_err());
}

/// Creates the file like a runtime, or returns an error.
struct Fake {
    log: PathBuf,
    refuse: Option<Outcome>,
    calls: Mutex<usize>,
}

#[async_trait::async_trait]
impl Reopen for Fake {
    async fn reopen(&self, _: &ContainerId) -> Result<(), CallError> {
        *self.calls.lock() += 1;
        match self.refuse {
            None => {
                std::fs::write(&self.log, "").unwrap();
                Ok(())
            }
            Some(outcome) => Err(CallError {
                method: "ReopenContainerLog",
                outcome,
                code: tonic::Code::Unknown,
                message: "no".to_owned(),
            }),
        }
    }
}

const SETTINGS: LogSettings = LogSettings {
    container_log_max_size: 10,
    container_log_max_files: 3,
    container_log_max_workers: 1,
    container_log_monitor_interval: Duration::from_secs(10),
};

fn pod(uid: &str) -> PodWork {
    PodWork { name: format!("default/{uid}"), ..PodWork::unnamed(&PodUid::parse(uid).unwrap()) }
}

fn containment(dir: &Path, clock: &Clock) -> Containment {
    let paths = quintlet_kit::args::paths::Paths::new(&dir.join("run"));
    std::fs::create_dir_all(paths.state_dir()).unwrap();
    Containment::open(&paths, "boot".to_owned(), clock.clone()).unwrap()
}

async fn looked(text: Option<&str>, refuse: Option<Outcome>) -> (tempfile::TempDir, usize, bool) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    if let Some(text) = text {
        std::fs::write(&path, text).unwrap();
    }
    let runtime = Fake { log: path.clone(), refuse, calls: Mutex::new(0) };
    let clock = Clock::fixed("2026-11-21T02:31:07Z".parse().unwrap(), Duration::from_secs(1));
    let id = ContainerId::parse("c1").unwrap();
    let log = Log { pod: pod("u1"), id, root: dir.path().to_owned(), path };
    let done = check_log(&runtime, &clock, &SETTINGS, &stalls(), &log).await;
    let calls = *runtime.calls.lock();
    (dir, calls, done.is_ok())
}

fn files(dir: &Path) -> Vec<(String, String)> {
    let mut out: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| {
            (
                e.file_name().into_string().unwrap(),
                String::from_utf8_lossy(&std::fs::read(e.path()).unwrap()).into_owned(),
            )
        })
        .collect();
    out.sort();
    out
}

#[tokio::test]
async fn a_log_is_rotated_when_it_is_too_large_and_reopened_when_it_is_missing() {
    let (dir, calls, ok) = looked(Some("short"), None).await;
    assert_eq!((files(dir.path()).len(), calls, ok), (1, 0, true));
    let (dir, calls, ok) = looked(Some("long enough"), None).await;
    let found = files(dir.path());
    assert_eq!((found.len(), calls, ok), (2, 1, true), "{found:?}");
    assert_eq!(found[0], ("0.log".to_owned(), String::new()));
    let (name, text) = &found[1];
    assert!(name.starts_with("0.log.20261121-") && name.len() == "0.log.20261121-023107".len(), "{name}");
    assert_eq!(text, "long enough");
    let (dir, calls, ok) = looked(None, None).await;
    assert_eq!((files(dir.path()).len(), calls, ok), (1, 1, true));
}

#[tokio::test(start_paused = true)]
async fn a_log_has_its_file_after_an_earlier_one_took_too_long_to_compress() {
    let dir = tempfile::tempdir().unwrap();
    let (path, earlier) = (dir.path().join("0.log"), dir.path().join("0.log.20261121-023000"));
    std::fs::write(&path, "long enough").unwrap();
    // Compressing takes a second or more. The file is sparse.
    std::fs::File::create(&earlier).unwrap().set_len(48 << 20).unwrap();
    let runtime = Fake { log: path.clone(), refuse: None, calls: Mutex::new(0) };
    let clock = Clock::fixed("2026-11-21T02:31:07Z".parse().unwrap(), Duration::from_secs(1));
    let id = ContainerId::parse("c1").unwrap();
    let log = Log { pod: pod("u1"), id, root: dir.path().to_owned(), path: path.clone() };
    let stalls = stalls();
    let check = check_log(&runtime, &clock, &SETTINGS, &stalls, &log);
    let late = async {
        while !dir.path().join("0.log.20261121-023000.tmp").exists() {
            tokio::task::yield_now().await;
        }
        tokio::time::advance(ROTATION * 2).await;
    };
    let (checked, ()) = tokio::join!(check, late);
    assert!(matches!(checked, Err(RotateError::Hangs { .. })), "{checked:?}");
    // The log is skipped until its earlier file is compressed.
    while stalls.run_one(&path, ROTATION, || ()).await.is_none() {
        tokio::task::yield_now().await;
    }
    assert!(path.exists() && !earlier.exists(), "the runtime writes to a file of another name");
    check_log(&runtime, &clock, &SETTINGS, &stalls, &log).await.unwrap();
    let found: Vec<_> = files(dir.path()).into_iter().map(|(name, _)| name).collect();
    assert_eq!(found, ["0.log", "0.log.20261121-023000.gz", "0.log.20261121-023107"]);
    assert_eq!(*runtime.calls.lock(), 1);
}

#[tokio::test]
async fn a_rotation_is_undone_if_the_runtime_refuses_to_reopen_and_not_if_the_outcome_is_unknown() {
    let (dir, _, ok) = looked(Some("long enough"), Some(Outcome::RuntimeError)).await;
    assert_eq!((files(dir.path()), ok), (vec![("0.log".to_owned(), "long enough".to_owned())], false));
    let (dir, _, ok) = looked(Some("long enough"), Some(Outcome::Unknown)).await;
    let found = files(dir.path());
    assert_eq!((found.len(), ok), (1, false));
    assert_ne!(found[0].0, "0.log", "the next look has it opened again");
}

/// Takes a second for each log, and counts the logs in progress.
#[derive(Default)]
struct Slow {
    now: Mutex<usize>,
    most: Mutex<usize>,
}

#[async_trait::async_trait]
impl Reopen for Slow {
    async fn reopen(&self, _: &ContainerId) -> Result<(), CallError> {
        *self.now.lock() += 1;
        let now = *self.now.lock();
        let most = now.max(*self.most.lock());
        *self.most.lock() = most;
        tokio::time::sleep(Duration::from_secs(1)).await;
        *self.now.lock() -= 1;
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn no_more_logs_are_rotated_concurrently_than_there_are_workers() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::fixed("2026-11-21T02:31:07Z".parse().unwrap(), Duration::from_secs(1));
    let log = |n| Log {
        pod: pod(&format!("u{n}")),
        id: ContainerId::parse(&format!("c{n}")).unwrap(),
        root: dir.path().to_owned(),
        path: dir.path().join(format!("{n}")),
    };
    let logs: Vec<Log> = (0..6).map(log).collect();
    let containment = containment(dir.path(), &clock);
    for (workers, seconds) in [(1, 6), (3, 2)] {
        let (runtime, began) = (Slow::default(), tokio::time::Instant::now());
        let settings = LogSettings { container_log_max_workers: workers, ..SETTINGS };
        check_logs(&runtime, &clock, &containment, &settings, &stalls(), &logs).await;
        assert_eq!((*runtime.most.lock(), began.elapsed().as_secs()), (workers, seconds));
    }
}

/// Panics for one container, and records the pods that it is called for.
struct Panics(Mutex<Vec<String>>);

#[async_trait::async_trait]
impl Reopen for Panics {
    async fn reopen(&self, id: &ContainerId) -> Result<(), CallError> {
        self.0.lock().push(contain::current().expect("the work belongs to a pod").uid().to_owned());
        assert_ne!(id.as_str(), "c1", "injected");
        Ok(())
    }
}

#[tokio::test]
async fn a_panic_in_one_rotation_affects_no_other_log_and_suspended_pods_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::fixed("2026-11-21T02:31:07Z".parse().unwrap(), Duration::from_secs(10_000));
    let containment = containment(dir.path(), &clock);
    let log = |n| Log {
        pod: pod(&format!("u{n}")),
        id: ContainerId::parse(&format!("c{n}")).unwrap(),
        root: dir.path().to_owned(),
        path: dir.path().join(format!("{n}")),
    };
    let logs: Vec<Log> = (0..3).map(log).collect();
    let rotated_pods = async || {
        let runtime = Panics(Mutex::default());
        check_logs(&runtime, &clock, &containment, &SETTINGS, &stalls(), &logs).await;
        let mut pods = runtime.0.into_inner();
        pods.sort();
        pods
    };
    assert_eq!(rotated_pods().await, ["u0", "u1", "u2"]);
    let panic = contain::Panic { message: "boom".to_owned(), location: "here".to_owned() };
    containment.record_panic(&PodUid::parse("u2").unwrap(), &panic);
    assert_eq!(rotated_pods().await, ["u0", "u1"]);
}

#[test]
fn links_are_created_and_broken_links_to_pod_logs_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (links, pods) = (dir.path().join("containers"), dir.path().join("pods"));
    std::fs::create_dir_all(&links).unwrap();
    std::fs::create_dir_all(&pods).unwrap();
    std::fs::write(pods.join("0.log"), "").unwrap();
    symlink(pods.join("gone.log"), links.join("broken.log")).unwrap();
    symlink("/somewhere/else.log", links.join("foreign.log")).unwrap();
    symlink(pods.join("gone.log"), links.join("old.log")).unwrap();
    let link = |name: &str, target: &str| Link { name: name.into(), target: pods.join(target) };
    let wanted = [link("new.log", "0.log"), link("old.log", "0.log"), link("early.log", "not-yet.log")];
    // The file system of one log hangs: nothing is known about it, so its link stays.
    symlink(pods.join("hangs.log"), links.join("hangs.log")).unwrap();
    let exists = |log: &Path| (!log.ends_with("hangs.log")).then(|| log.exists());
    remove_broken(&links, &pods, &wanted.iter().map(|l| l.name.as_str()).collect(), exists).unwrap();
    make(&links, &wanted, exists);
    let mut found: Vec<_> = std::fs::read_dir(&links)
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| (e.file_name().into_string().unwrap(), std::fs::read_link(e.path()).unwrap()))
        .collect();
    found.sort();
    assert_eq!(
        found,
        [
            ("foreign.log".to_owned(), PathBuf::from("/somewhere/else.log")),
            ("hangs.log".to_owned(), pods.join("hangs.log")),
            ("new.log".to_owned(), pods.join("0.log")),
            ("old.log".to_owned(), pods.join("0.log")),
        ]
    );
}

#[test]
fn a_log_path_outside_of_the_log_directory_is_ignored() {
    let dir = Path::new("/var/log/pods");
    for (path, want) in [
        ("/var/log/pods/ns_p_u/c/0.log", true),
        ("/etc/passwd", false),
        ("/var/log/pods/../../../etc/passwd", false),
        ("", false),
    ] {
        assert_eq!(is_within(Path::new(path), dir), want, "{path}");
    }
}
