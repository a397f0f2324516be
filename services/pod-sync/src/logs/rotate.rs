//! Which rotated files of a log stay, and in which form.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;

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

/// Names of the rotated files of a log.
fn siblings(log: &Path) -> io::Result<BTreeSet<String>> {
    let (Some(dir), Some(name)) = (log.parent(), log.file_name().and_then(|n| n.to_str())) else {
        return Ok(BTreeSet::new());
    };
    let prefix = format!("{name}.");
    let mut out = BTreeSet::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && name.starts_with(&prefix)
            && entry.file_type()?.is_file()
        {
            out.insert(name);
        }
    }
    Ok(out)
}

/// Deletes and compresses rotated files of a log, so that `keep` remain before the next rotation.
///
/// # Errors
/// The directory or a file cannot be read or written. What was not done is done the next time.
pub fn make_room(log: &Path, keep: usize) -> io::Result<()> {
    let dir = log.parent().unwrap_or(Path::new("/"));
    let plan = plan(&siblings(log)?, keep);
    for name in &plan.delete {
        fs::remove_file(dir.join(name))?;
    }
    for name in &plan.compress {
        compress(&dir.join(name))?;
    }
    Ok(())
}

/// Makes `<file>.gz` of a file, with its mode. At every moment one of the two is whole.
fn compress(path: &Path) -> io::Result<()> {
    let (tmp, gz) = (with_suffix(path, TMP), with_suffix(path, GZ));
    let mut from = File::open(path)?;
    let mode = from.metadata()?.permissions().mode();
    let to = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&tmp)?;
    let written = (|| {
        let mut encoder = GzEncoder::new(to, Compression::default());
        io::copy(&mut from, &mut encoder)?;
        encoder.finish()?.flush()?;
        fs::rename(&tmp, &gz)
    })();
    if let Err(error) = written {
        // On a full disk what there is of it is in the way.
        let _ = fs::remove_file(&tmp);
        return Err(error);
    }
    fs::remove_file(path)
}
