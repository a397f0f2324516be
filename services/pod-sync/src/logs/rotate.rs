//! Which rotated files of a log stay, and in which form.

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

/// Of a compressed file.
const GZ: &str = ".gz";
/// Of one that is being compressed.
const TMP: &str = ".tmp";

/// The name a log gets when it is rotated at `now`, in the node's own time (pkg/kubelet/logs/container_log_manager.go).
#[must_use]
pub fn rotated(log: &Path, now: jiff::Timestamp) -> PathBuf {
    let local = now.to_zoned(jiff::tz::TimeZone::system());
    with_suffix(log, &format!(".{}", local.strftime("%Y%m%d-%H%M%S")))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// What is to be done with the files beside a log.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// To delete.
    pub delete: Vec<String>,
    /// To compress.
    pub compress: Vec<String>,
}

/// Plans for the rotated files `names` of one log, so that the newest `keep` remain, compressed.
#[must_use]
pub fn plan(names: &BTreeSet<String>, keep: usize) -> Plan {
    let mut plan = Plan::default();
    let mut left = Vec::new();
    for name in names {
        // A file that was compressed and not deleted is there twice.
        if name.ends_with(TMP) || names.contains(&format!("{name}{GZ}")) {
            plan.delete.push(name.clone());
        } else {
            left.push(name.clone());
        }
    }
    // The names are times: sorted, the oldest come first.
    let old = left.len().saturating_sub(keep);
    plan.delete.extend(left.drain(..old));
    plan.compress = left.into_iter().filter(|name| !name.ends_with(GZ)).collect();
    plan
}

/// Returns the size of a log.
///
/// # Errors
/// It does not exist, or is no regular file.
pub fn size(dir: &Dir, log: &Path) -> io::Result<u64> {
    let stat = dir.stat(log)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// Names of the rotated files of a log, and of what else begins with its name.
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

/// Deletes and compresses rotated files of a log beneath `dir`, so that `keep` remain before the next rotation.
///
/// # Errors
/// The directory or a file cannot be read or written. What was not done is done the next time.
pub fn make_room(dir: &Dir, log: &Path, keep: usize) -> io::Result<()> {
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

/// Makes `<file>.gz` of a file, with its mode. At every moment one of the two is whole.
fn compress(dir: &Dir, path: &Path) -> io::Result<()> {
    let (tmp, gz) = (with_suffix(path, TMP), with_suffix(path, GZ));
    let mut from = dir.read(path)?;
    let mode = from.metadata()?.permissions().mode() & 0o777;
    // A rest of an earlier try, or what somebody put in its place: a pod may write to the directory of logs.
    match dir.remove_file(&tmp) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        Ok(()) | Err(_) => {}
    }
    let to = dir.create_new(&tmp, mode)?;
    let written = (|| {
        let mut encoder = GzEncoder::new(to, Compression::default());
        io::copy(&mut from, &mut encoder)?;
        encoder.finish()?.flush()?;
        dir.rename(&tmp, &gz)
    })();
    if let Err(error) = written {
        // On a full disk what there is of it is in the way.
        let _ = dir.remove_file(&tmp);
        return Err(error);
    }
    dir.remove_file(path)
}
