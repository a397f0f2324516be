//! Decides which rotated files of a log are kept, deleted and compressed.

use std::collections::BTreeSet;
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use quintlet_kit::beneath::Dir;
use quintlet_kit::tree;
use rustix::fs::FileType;

/// Suffix of a compressed file.
const GZ: &str = ".gz";
/// Suffix of a file while it is being compressed.
const TMP: &str = ".tmp";

/// Returns the name of a log that is rotated at `now`, in local time
/// (pkg/kubelet/logs/container_log_manager.go).
#[must_use]
pub(crate) fn rotated(log: &Path, now: jiff::Timestamp) -> PathBuf {
    let local = now.to_zoned(jiff::tz::TimeZone::system());
    with_suffix(log, &format!(".{}", local.strftime("%Y%m%d-%H%M%S")))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Changes of the rotated files of a log, by file name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RotationPlan {
    pub(crate) delete: Vec<String>,
    pub(crate) compress: Vec<String>,
}

/// Decides about the rotated files `names` of one log, so that the newest `keep` are kept and compressed.
#[must_use]
pub(crate) fn plan(names: &BTreeSet<String>, keep: usize) -> RotationPlan {
    let mut plan = RotationPlan::default();
    let mut left = Vec::new();
    for name in names {
        // A file that was compressed and not deleted exists in both forms.
        if name.ends_with(TMP) || names.contains(&format!("{name}{GZ}")) {
            plan.delete.push(name.clone());
        } else {
            left.push(name.clone());
        }
    }
    // Names end with their time, so the oldest files come first.
    let old = left.len().saturating_sub(keep);
    plan.delete.extend(left.drain(..old));
    plan.compress = left.into_iter().filter(|name| !name.ends_with(GZ)).collect();
    plan
}

/// Returns the size of a log.
///
/// # Errors
/// The log does not exist or is not a regular file.
pub(crate) fn size(dir: &Dir, log: &Path) -> io::Result<u64> {
    let stat = dir.stat(log)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// Returns the names of regular files that begin with the name of the log.
fn siblings(dir: &Dir, log: &Path) -> io::Result<BTreeSet<String>> {
    let (Some(parent), Some(name)) = (log.parent(), log.file_name().and_then(|n| n.to_str())) else {
        return Ok(BTreeSet::new());
    };
    let prefix = format!("{name}.");
    let mut out = BTreeSet::new();
    for entry in rustix::fs::Dir::new(tree::open_within(dir.dir(parent)?.as_fd(), c".")?)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().to_str()
            && name.starts_with(&prefix)
            && size(dir, &parent.join(name)).is_ok()
        {
            out.insert(name.to_owned());
        }
    }
    Ok(out)
}

/// Deletes and compresses rotated files of a log, so that `keep` are left before the next rotation. After an
/// error the rest is done at the next rotation.
pub(crate) fn make_room(dir: &Dir, log: &Path, keep: usize) -> io::Result<()> {
    let parent = log.parent().unwrap_or(Path::new("."));
    let plan = plan(&siblings(dir, log)?, keep);
    for name in &plan.delete {
        dir.remove_file(&parent.join(name))?;
    }
    for name in &plan.compress {
        compress(dir, &parent.join(name))?;
    }
    Ok(())
}

/// Compresses a file to `<file>.gz` with the same mode. One of the two files is complete at any time.
fn compress(dir: &Dir, path: &Path) -> io::Result<()> {
    let (tmp, gz) = (with_suffix(path, TMP), with_suffix(path, GZ));
    let mut log = dir.read(path)?;
    let mode = log.metadata()?.permissions().mode() & 0o777;
    // Left by an earlier attempt, or planted: a pod may be able to write to the log directory.
    match dir.remove_file(&tmp) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        Ok(()) | Err(_) => {}
    }
    let archive = dir.create_new(&tmp, mode)?;
    let written = (|| {
        let mut encoder = GzEncoder::new(archive, Compression::default());
        io::copy(&mut log, &mut encoder)?;
        encoder.finish()?.flush()?;
        dir.rename(&tmp, &gz)
    })();
    if let Err(error) = written {
        // A partial file would waste space on a full disk.
        let _ = dir.remove_file(&tmp);
        return Err(error);
    }
    dir.remove_file(path)
}
