//! Rotates the services' logs. A restart of the services appends to the existing logs.
//!
//! A service keeps its log open and must be able to write it without this process. Therefore a log is not
//! renamed: its content is copied to `NAME.log.1`, and then the file is truncated. A service takes a shared
//! lock for each line (`write_line` of quintlet-telemetry). The rotation takes the exclusive lock for the
//! last bytes of the copy, so that no line is lost or split. Containerd does not lock its log: a line that it
//! writes within those microseconds is lost.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use serde_json::json;

/// Interval of checks of the sizes.
const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// Attempts to lock a log, a millisecond apart. A service that was stopped by SIGSTOP may hold its lock for
/// long; the next check retries.
const ATTEMPTS: u32 = 50;

/// The limits of a service's logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size at which a log is rotated, in bytes.
    pub size: u64,
    /// Number of files of one service, including the current one.
    pub files: u32,
}

/// Returns the log of a service.
#[must_use]
pub fn path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.log"))
}

/// Mode of the logs, which contain audit lines and names of Secrets.
const MODE: u32 = 0o640;

/// Opens a log for appending and creates it if needed. The mode of an existing log is corrected.
///
/// # Errors
/// The log cannot be opened, or its mode cannot be set.
pub fn open(log: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create(true).append(true).mode(MODE).open(log)?;
    file.set_permissions(Permissions::from_mode(MODE))?;
    Ok(file)
}

/// Appends a line to a log that marks the start of the services, in the format of the log.
///
/// # Errors
/// The log cannot be opened or written.
pub fn append_start_line(log: &Path, format: &str, now: Timestamp) -> io::Result<()> {
    let message = concat!("quintctl up started, version ", env!("CARGO_PKG_VERSION"));
    let line = if format == "json" {
        json!({"ts": format!("{now:.6}"), "level": "info", "service": "quintctl", "msg": message}).to_string()
    } else {
        format!("{now:.3}  INFO quintctl {message}")
    };
    let mut log = open(log)?;
    log.write_all(format!("{line}\n").as_bytes())
}

/// Rotates the logs of `names` that exceed their size, periodically.
pub async fn rotate_periodically(dir: PathBuf, names: Vec<&'static str>, limits: Limits) {
    loop {
        let logs: Vec<PathBuf> = names.iter().map(|name| path(&dir, name)).collect();
        let work = move || {
            for log in logs {
                if let Err(error) = rotate(&log, limits) {
                    tracing::warn!(log = %log.display(), %error, "log rotation failed, retrying");
                }
            }
        };
        // The panic hook has logged a panic.
        let _ = contained_request(None, task::blocking(work)).await;
        tokio::time::sleep(CHECK_PERIOD).await;
    }
}

/// Rotates a log that exceeds its size. Returns whether it did.
fn rotate(log: &Path, limits: Limits) -> io::Result<bool> {
    let mut file = match OpenOptions::new().read(true).write(true).open(log) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        opened => opened?,
    };
    let size = file.metadata()?.len();
    if size < limits.size {
        return Ok(false);
    }
    let new = numbered(log, "new");
    let mut copy = OpenOptions::new().write(true).create(true).truncate(true).mode(MODE).open(&new)?;
    // Most of the copy is made without the lock, which blocks the service.
    io::copy(&mut (&mut file).take(size), &mut copy)?;
    let Some(mut file) = lock(file)? else { return Ok(false) };
    file.seek(SeekFrom::Start(size))?;
    io::copy(&mut *file, &mut copy)?;
    for number in (1..limits.files.saturating_sub(1)).rev() {
        let (old, new) =
            (numbered(log, &number.to_string()), numbered(log, &number.saturating_add(1).to_string()));
        match std::fs::rename(old, new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    // Done before the log is truncated: if this process is killed in between, lines are duplicated and not
    // lost.
    if limits.files > 1 {
        std::fs::rename(&new, numbered(log, "1"))?;
    } else {
        std::fs::remove_file(&new)?;
    }
    file.set_len(0)?;
    Ok(true)
}

fn lock(mut file: File) -> io::Result<Option<Flock<File>>> {
    for _ in 0..ATTEMPTS {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(lock)),
            Err((back, Errno::EWOULDBLOCK | Errno::EINTR)) => file = back,
            Err((_, errno)) => return Err(errno.into()),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

fn numbered(log: &Path, number: &str) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(format!(".{number}"));
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use proptest::prelude::*;

    use super::*;

    fn append(log: &Path) -> File {
        OpenOptions::new().create(true).append(true).open(log).unwrap()
    }

    /// Returns the lines of all files, from the oldest to the newest.
    fn all(log: &Path, limits: Limits) -> Vec<String> {
        let older = (1..limits.files).rev().map(|n| numbered(log, &n.to_string()));
        older
            .chain([log.to_path_buf()])
            .flat_map(|file| {
                std::fs::read_to_string(file)
                    .unwrap_or_default()
                    .lines()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(quintlet_testkit::budget::cases(64)))]
        #[test]
        fn the_newest_lines_are_kept_without_a_gap_in_files_near_the_limit(
            lengths in prop::collection::vec(1_usize..60, 1..120), size in 50_u64..400, files in 1_u32..5, look in 1_usize..9,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let log = dir.path().join("a.log");
            let limits = Limits { size, files };
            let mut written = Vec::new();
            let mut cuts = 0;
            for (n, length) in lengths.iter().enumerate() {
                let line = format!("{n} {}", "x".repeat(*length));
                quintlet_telemetry::write_line(&mut append(&log), format!("{line}\n").as_bytes());
                written.push(line);
                if n % look == 0 && rotate(&log, limits).unwrap() {
                    cuts += 1;
                }
            }
            let left = all(&log, limits);
            prop_assert!(written.ends_with(&left), "{left:?} of {written:?}");
            prop_assert!(cuts >= files || left.len() == written.len(), "files are left over, and so are all lines");
            // A look comes every `look` lines of at most 65 bytes.
            let most = size + u64::try_from(look * 65).unwrap();
            let there: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap()).collect();
            prop_assert!(there.len() <= usize::try_from(files).unwrap(), "{there:?}");
            for file in there {
                prop_assert!(file.metadata().unwrap().len() <= most, "{file:?}");
            }
        }
    }

    #[test]
    fn lines_written_during_a_rotation_are_kept_once_and_whole() {
        const CUTS: u32 = 100;
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("a.log");
        let limits = Limits { size: 2_000, files: CUTS + 1 };
        let mut file = append(&log);
        let is_over = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&is_over);
        let writer = std::thread::spawn(move || {
            let mut written = 0;
            while !end.load(Ordering::Relaxed) {
                quintlet_telemetry::write_line(&mut file, format!("line {written}\n").as_bytes());
                written += 1;
            }
            written
        });
        let mut cuts = 0;
        while cuts < CUTS {
            cuts += u32::from(rotate(&log, limits).unwrap());
        }
        is_over.store(true, Ordering::Relaxed);
        let written: usize = writer.join().unwrap();
        let want: Vec<String> = (0..written).map(|n| format!("line {n}")).collect();
        let left = all(&log, limits);
        assert!(left == want, "{} of {written} lines", left.len());
    }

    #[test]
    fn a_locked_log_is_rotated_at_a_later_check() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("a.log");
        let limits = Limits { size: 1, files: 2 };
        std::fs::write(&log, "one\n").unwrap();
        let holder = Flock::lock(append(&log), FlockArg::LockShared).unwrap();
        assert!(!rotate(&log, limits).unwrap());
        drop(holder);
        assert!(rotate(&log, limits).unwrap());
        assert_eq!(all(&log, limits), ["one"]);
    }

    #[test]
    fn logs_and_their_copies_are_not_readable_by_other_users() {
        let dir = tempfile::tempdir().unwrap();
        let (new, old) = (dir.path().join("new.log"), dir.path().join("old.log"));
        std::fs::write(&old, "before\n").unwrap();
        std::fs::set_permissions(&old, Permissions::from_mode(0o644)).unwrap();
        let mode = |log: &Path| std::fs::metadata(log).unwrap().permissions().mode() & 0o777;
        for log in [&new, &old] {
            append_start_line(log, "text", Timestamp::UNIX_EPOCH).unwrap();
            assert!(rotate(log, Limits { size: 1, files: 2 }).unwrap());
            assert_eq!((mode(log), mode(&numbered(log, "1"))), (0o640, 0o640), "{}", log.display());
        }
    }

    #[test]
    fn a_start_is_logged_in_the_format_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("a.log");
        std::fs::write(&log, "before\n").unwrap();
        let now = "2026-11-21T02:31:07.112345Z".parse().unwrap();
        append_start_line(&log, "text", now).unwrap();
        append_start_line(&log, "json", now).unwrap();
        let text = std::fs::read_to_string(&log).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "before");
        assert!(
            lines[1].starts_with("2026-11-21T02:31:07.112Z  INFO quintctl quintctl up started"),
            "{text}"
        );
        let json: serde_json::Value = serde_json::from_str(lines[2]).unwrap();
        assert_eq!((json["level"].as_str(), json["service"].as_str()), (Some("info"), Some("quintctl")));
    }
}
