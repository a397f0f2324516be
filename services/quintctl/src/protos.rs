//! `quintctl protos`: the contract for subscribers, for clients in any language.

use std::io::{self, IsTerminal as _};

use crate::error::Error;
use crate::out::print;

/// The contract with what it imports, and the configuration of buf. Paths are below the directory of the
/// archive.
const FILES: [(&str, &str); 3] = [
    ("buf.yaml", include_str!("../../../proto/buf.yaml")),
    ("quintlet/common/v1/common.proto", include_str!("../../../proto/quintlet/common/v1/common.proto")),
    (
        "quintlet/subscribe/v1/subscribe.proto",
        include_str!("../../../proto/quintlet/subscribe/v1/subscribe.proto"),
    ),
];

/// Directory of the archive.
const DIRECTORY: &str = "quintlet-proto";

pub(crate) fn run() -> Result<(), Error> {
    if io::stdout().is_terminal() {
        let terminal = io::Error::other("standard output is a terminal: quintctl protos | tar x");
        return Err(Error::os("print a tar archive")(terminal));
    }
    print(archive().map_err(Error::os("make a tar archive"))?)
}

/// Returns a tar archive of the files.
fn archive() -> io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, text) in FILES {
        let mut header = tar::Header::new_ustar();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, format!("{DIRECTORY}/{path}"), text.as_bytes())?;
    }
    archive.into_inner()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_has_each_file_that_the_contract_imports() {
        let bytes = archive().unwrap();
        let mut archive = tar::Archive::new(&bytes[..]);
        let paths: Vec<String> =
            archive.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect();
        assert_eq!(paths.len(), FILES.len());
        for (_, text) in FILES {
            for import in text.lines().filter_map(|line| line.strip_prefix("import \"")?.strip_suffix("\";"))
            {
                assert!(paths.contains(&format!("{DIRECTORY}/{import}")), "{import} is missing: {paths:?}");
            }
        }
    }
}
