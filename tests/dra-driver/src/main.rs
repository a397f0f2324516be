//! The driver of claims as a program, for machines that restart: `dra-driver ROOT NAME CDI_DIR`.

use std::error::Error;
use std::path::{Path, PathBuf};

use quintlet_dra_driver::TestDriver;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [root, name, cdi_dir] = args.as_slice() else {
        return Err("usage: dra-driver ROOT NAME CDI_DIR".into());
    };
    let registry = PathBuf::from(root).join("plugins_registry");
    std::fs::create_dir_all(&registry)?;
    let socket = registry.join(format!("{name}.sock"));
    // One of before the machine's restart.
    let _ = std::fs::remove_file(&socket);
    let driver = TestDriver::start(&socket, name);
    driver.describe_devices_in(Path::new(cdi_dir));
    loop {
        std::thread::park();
    }
}
