//! The manifest directory (pkg/kubelet/config/file.go): read at start, on inotify events, and every period.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::Watcher as _;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::decode::{self, Origin};
use super::{MAX_MANIFEST, Problem, Snapshot, SourceKind, SourceSender};

/// Wait after the first event for others that belong to it: editors write in several steps.
const SETTLE: Duration = Duration::from_millis(20);

/// Reads the directory or file at `path`. What cannot be read is a problem of that file alone.
#[must_use]
pub fn read(path: &Path, node: &str) -> Snapshot {
    let mut out = Snapshot::default();
    let mut problem = |origin: &Path, message: String| {
        out_problem(&mut out.problems, origin, message);
    };
    let files = match std::fs::metadata(path) {
        Err(e) => {
            problem(path, format!("cannot be read: {e}"));
            return out;
        }
        Ok(meta) if meta.is_file() => vec![path.to_owned()],
        Ok(_) => match list(path) {
            Ok(files) => files,
            Err(e) => {
                problem(path, format!("cannot be listed: {e}"));
                return out;
            }
        },
    };
    let mut origins = Vec::new();
    for file in files {
        match read_file(&file) {
            Ok(bytes) => {
                let place = file.display().to_string();
                decode::manifest(&bytes, Origin { kind: SourceKind::File, place: &place, node }, &mut out);
                origins.resize(out.pods.len(), place);
            }
            Err(e) => out_problem(&mut out.problems, &file, format!("cannot be read: {e}")),
        }
    }
    drop_duplicates(&mut out, &origins);
    out
}

fn out_problem(problems: &mut Vec<Problem>, origin: &Path, message: String) {
    problems.push(Problem { origin: origin.display().to_string(), field: String::new(), message });
}

// The kubelet lets the last file of a name win in silence. Here the first keeps the name and the others are said.
fn drop_duplicates(out: &mut Snapshot, origins: &[String]) {
    let mut first: BTreeMap<(Option<String>, Option<String>), &str> = BTreeMap::new();
    let mut problems = Vec::new();
    let mut pods = Vec::new();
    for (pod, origin) in out.pods.drain(..).zip(origins) {
        let key = (pod.metadata.namespace.clone(), pod.metadata.name.clone());
        match first.get(&key) {
            Some(other) => problems.push(Problem {
                origin: origin.clone(),
                field: "metadata.name".to_owned(),
                message: format!(
                    "duplicate pod name {:?}: {other} has it, this one is ignored",
                    key.1.unwrap_or_default()
                ),
            }),
            None => {
                first.insert(key, origin);
                pods.push(pod);
            }
        }
    }
    out.pods = pods;
    out.problems.extend(problems);
}

fn list(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        // Follows links, as the kubelet does; what vanished meanwhile is not there.
        if std::fs::metadata(entry.path()).is_ok_and(|m| m.is_file()) {
            files.push(entry.path());
        }
    }
    files.sort();
    Ok(files)
}

fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_MANIFEST as u64).read_to_end(&mut bytes)?;
    if bytes.len() >= MAX_MANIFEST {
        return Err(std::io::Error::other(format!("larger than {MAX_MANIFEST} bytes")));
    }
    Ok(bytes)
}

/// Sends a snapshot at start, after every change and every `period`, until told to stop.
pub async fn run(path: PathBuf, node: String, period: Duration, out: SourceSender, stop: CancellationToken) {
    // One slot: an event only says "look again".
    let (wake, mut woken) = mpsc::channel::<()>(1);
    let mut watcher = None;
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        if watcher.is_none() {
            watcher = watch(&path, wake.clone());
        }
        // Dropping either arm loses nothing: the directory is read as a whole after any of them.
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
            _ = woken.recv() => {
                tokio::time::sleep(SETTLE).await;
                while woken.try_recv().is_ok() {}
            }
        }
        if !path.exists() {
            // A directory that comes back is another inode: watch it anew.
            watcher = None;
        }
        let snapshot = {
            let (path, node) = (path.clone(), node.clone());
            tokio::task::spawn_blocking(move || read(&path, &node)).await.unwrap_or_default()
        };
        // Dropping a snapshot on stop is harmless: nobody is left to act on it.
        tokio::select! {
            () = stop.cancelled() => return,
            sent = out.send((SourceKind::File, snapshot)) => if sent.is_err() { return },
        }
        if watcher.is_none() {
            // Without inotify the kubelet looks again every second.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(Duration::from_secs(1)) => ticks.reset_immediately(),
            }
        }
    }
}

fn watch(path: &Path, wake: mpsc::Sender<()>) -> Option<notify::RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading a file is an event too; looking again for it would never end.
        if !event.is_ok_and(|e| e.kind.is_access() && !is_close_write(&e)) {
            let _ = wake.try_send(());
        }
    })
    .ok()?;
    watcher.watch(path, notify::RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}

fn is_close_write(event: &notify::Event) -> bool {
    use notify::event::{AccessKind, AccessMode};
    matches!(event.kind, notify::EventKind::Access(AccessKind::Close(AccessMode::Write)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{name: a, image: b}}]}}\n"
        )
    }

    #[test]
    fn dot_files_and_directories_are_left_out_and_a_bad_file_harms_no_other() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.yaml"), pod("a")).unwrap();
        std::fs::write(dir.path().join(".b.yaml"), pod("b")).unwrap();
        std::fs::create_dir(dir.path().join("c")).unwrap();
        std::fs::write(dir.path().join("d.yaml"), "{{").unwrap();
        std::fs::write(dir.path().join("e.yaml"), pod("a")).unwrap();
        let out = read(dir.path(), "n");
        assert_eq!(out.pods.len(), 1);
        assert_eq!(out.problems.len(), 2, "{:?}", out.problems);
    }

    #[tokio::test]
    async fn a_change_behind_a_link_is_found_at_the_next_look() {
        let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let real = elsewhere.path().join("real.yaml");
        std::fs::write(&real, pod("a")).unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("a.yaml")).unwrap();
        let (tx, mut rx) = mpsc::channel(4);
        let stop = CancellationToken::new();
        let task = run(dir.path().to_owned(), "n".into(), Duration::from_millis(50), tx, stop.clone());
        let check = async {
            assert_eq!(rx.recv().await.unwrap().1.pods[0].metadata.name.as_deref(), Some("a-n"));
            // Of this the watched directory hears nothing.
            std::fs::write(&real, pod("b")).unwrap();
            let is_new = |s: &Snapshot| s.pods.iter().any(|p| p.metadata.name.as_deref() == Some("b-n"));
            let found = async { while rx.recv().await.is_some_and(|(_, s)| !is_new(&s)) {} };
            tokio::time::timeout(Duration::from_secs(10), found).await.expect("the change is found");
            stop.cancel();
            while rx.recv().await.is_some() {}
        };
        tokio::join!(task, check);
    }

    #[tokio::test]
    async fn a_new_a_changed_and_a_removed_manifest_each_bring_a_snapshot_long_before_the_period() {
        let dir = tempfile::tempdir().unwrap();
        let (tx, mut rx) = mpsc::channel(4);
        let stop = CancellationToken::new();
        let path = dir.path().to_owned();
        let task = run(path.clone(), "n".into(), Duration::from_secs(3600), tx, stop.clone());
        let check = async {
            let mut wait = async |want: &[&str]| {
                let mut last = Vec::new();
                let found = tokio::time::timeout(Duration::from_secs(10), async {
                    while let Some((_, s)) = rx.recv().await {
                        last = s.pods.iter().map(|p| p.metadata.name.clone().unwrap_or_default()).collect();
                        if last == want {
                            return;
                        }
                    }
                })
                .await;
                assert!(found.is_ok(), "want {want:?}, last {last:?}");
            };
            wait(&[]).await;
            std::fs::write(path.join("a.yaml"), pod("a")).unwrap();
            wait(&["a-n"]).await;
            std::fs::write(path.join("a.yaml"), pod("b")).unwrap();
            wait(&["b-n"]).await;
            std::fs::remove_file(path.join("a.yaml")).unwrap();
            wait(&[]).await;
            stop.cancel();
        };
        tokio::join!(task, check);
    }
}
