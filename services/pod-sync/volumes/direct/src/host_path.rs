//! hostPath volumes (`pkg/volume/hostpath`).

use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Component, Path};

/// Checks a host path against its type, and creates it for the types `DirectoryOrCreate` and `FileOrCreate`.
///
/// # Errors
/// The kubelet's message.
pub fn check_type(path: &str, kind: &str) -> Result<(), String> {
    let p = Path::new(path);
    if p.components().any(|c| c == Component::ParentDir) {
        return Err(format!("invalid HostPath `{path}`: must not contain '..'"));
    }
    let meta = || fs::metadata(p).ok();
    let must = |holds: bool, what: &str| {
        if holds { Ok(()) } else { Err(format!("hostPath type check failed: {path} is not a {what}")) }
    };
    match kind {
        "" => Ok(()),
        "DirectoryOrCreate" => {
            if meta().is_none() {
                fs::DirBuilder::new().recursive(true).mode(0o755).create(p).map_err(|e| e.to_string())?;
            }
            must(meta().is_some_and(|m| m.is_dir()), "directory")
        }
        "Directory" => must(meta().is_some_and(|m| m.is_dir()), "directory"),
        "FileOrCreate" => {
            if meta().is_none() {
                let mut options = fs::OpenOptions::new();
                options.create(true).append(true).mode(0o644).open(p).map_err(|e| e.to_string())?;
            }
            must(meta().is_some_and(|m| m.is_file()), "file")
        }
        "File" => must(meta().is_some_and(|m| m.is_file()), "file"),
        "Socket" => must(meta().is_some_and(|m| m.file_type().is_socket()), "socket file"),
        "CharDevice" => must(meta().is_some_and(|m| m.file_type().is_char_device()), "character device"),
        "BlockDevice" => must(meta().is_some_and(|m| m.file_type().is_block_device()), "block device"),
        other => Err(format!("{other} is an invalid volume type")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_path_type_is_checked() {
        let tmp = tempfile::tempdir().unwrap();
        let at = |name: &str| tmp.path().join(name).display().to_string();
        fs::write(at("f"), "").unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("s")).unwrap();
        let dir = tmp.path().display().to_string();
        for (path, kind, want) in [
            (at("none"), "", None),
            (dir.clone(), "Directory", None),
            (
                at("f"),
                "Directory",
                Some(format!("hostPath type check failed: {} is not a directory", at("f"))),
            ),
            (at("new/deep"), "DirectoryOrCreate", None),
            (
                at("f"),
                "DirectoryOrCreate",
                Some(format!("hostPath type check failed: {} is not a directory", at("f"))),
            ),
            (at("f"), "File", None),
            (dir.clone(), "File", Some(format!("hostPath type check failed: {dir} is not a file"))),
            (at("made"), "FileOrCreate", None),
            (at("s"), "Socket", None),
            (
                at("f"),
                "Socket",
                Some(format!("hostPath type check failed: {} is not a socket file", at("f"))),
            ),
            ("/dev/null".into(), "CharDevice", None),
            (
                "/dev/null".into(),
                "BlockDevice",
                Some("hostPath type check failed: /dev/null is not a block device".into()),
            ),
            (
                at("none"),
                "CharDevice",
                Some(format!("hostPath type check failed: {} is not a character device", at("none"))),
            ),
            (dir.clone(), "X", Some("X is an invalid volume type".into())),
            ("/a/../b".into(), "", Some("invalid HostPath `/a/../b`: must not contain '..'".into())),
        ] {
            assert_eq!(check_type(&path, kind).err(), want, "{path} {kind}");
        }
        assert!(tmp.path().join("new/deep").is_dir() && tmp.path().join("made").is_file());
        assert!(check_type(&at("no/parent"), "FileOrCreate").is_err());
    }
}
