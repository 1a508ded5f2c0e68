//! NVRTC, CUDA's runtime compiler. It needs no GPU, so tests compile every kernel for every architecture.

use std::ffi::{CString, c_char};
use std::path::Path;

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use super::{CudaError, library, source::Source};

/// The options of every compilation. They make the log list each kernel's registers and spills.
const OPTIONS: &[&str] = &["--std=c++17", "--generate-line-info", "--ptxas-options=-v"];

/// The loaded compiler.
#[derive(Debug)]
pub struct Nvrtc {
    version: (i32, i32),
}

/// Machine code for one architecture.
#[derive(Debug)]
pub struct CompiledCode {
    pub cubin: Vec<u8>,
    /// The compiler's output. Empty if the code came from the cache.
    pub log: String,
}

/// One program in the compiler. Dropping it destroys the compiler's object.
struct Program(sys::nvrtcProgram);

// === impl Nvrtc ===

impl Nvrtc {
    /// Loads the library from `folder`, if one is named, else from the usual places.
    pub fn load(folder: Option<&Path>) -> Result<Self, CudaError> {
        library::load_nvrtc(folder)?;
        let (mut major, mut minor) = (0, 0);
        // JUSTIFICATION: cudarc has no safe call for this.
        // SAFETY: both pointers are to numbers that outlive the call.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(failed("nvrtcVersion"))?;
        Ok(Self { version: (major, minor) })
    }

    /// Returns the CUDA version that the compiler targets.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns a text of everything that the machine code depends on. Equal texts give equal code.
    pub fn recipe(&self, source: &Source, arch: &str) -> String {
        let (major, minor) = self.version;
        format!("nvrtc {major}.{minor}\n{arch}\n{}\n{}\n{}", OPTIONS.join(" "), source.name, source.text)
    }

    /// Compiles to machine code for an architecture such as `sm_90a`.
    pub fn compile(&self, source: &Source, arch: &str) -> Result<CompiledCode, CudaError> {
        let program = Program::new(source)?;
        let mut options = vec![format!("--gpu-architecture={arch}")];
        options.extend(OPTIONS.iter().map(|option| (*option).to_owned()));
        // JUSTIFICATION: the compiler is a C library.
        // SAFETY: the program lives until the end of this function, and no option holds a zero byte.
        let outcome = unsafe { result::compile_program(program.0, &options) };
        let log = program.log()?;
        match outcome {
            Ok(()) => Ok(CompiledCode { cubin: program.cubin()?, log }),
            Err(_) => Err(CudaError::Compile { source_name: source.name, arch: arch.to_owned(), log }),
        }
    }
}

// === impl Program ===

impl Program {
    fn new(source: &Source) -> Result<Self, CudaError> {
        let text = CString::new(source.text).expect("the kernels' text has no zero byte");
        let name = CString::new(source.name).expect("a file name has no zero byte");
        result::create_program(&text, Some(&name)).map(Self).map_err(failed("nvrtcCreateProgram"))
    }

    fn log(&self) -> Result<String, CudaError> {
        // JUSTIFICATION: the compiler is a C library.
        // SAFETY: the program is alive, and the call allocates as much as the library reports.
        let log = unsafe { result::get_program_log(self.0) }.map_err(failed("nvrtcGetProgramLog"))?;
        let bytes: Vec<u8> =
            log.iter().flat_map(|byte| byte.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>, CudaError> {
        let mut len = 0;
        // JUSTIFICATION: cudarc's safe calls return PTX only, which the driver would compile again.
        // SAFETY: the program is alive, and the pointer is to a number that outlives the call.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut len) }.result().map_err(failed("nvrtcGetCUBINSize"))?;
        let mut cubin = vec![0_u8; len];
        // JUSTIFICATION: cudarc's safe calls return PTX only.
        // SAFETY: the buffer has the size that the library reported.
        let outcome = unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast::<c_char>()) };
        outcome.result().map_err(failed("nvrtcGetCUBIN"))?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // JUSTIFICATION: the compiler is a C library.
        // SAFETY: the program was created and is destroyed once. If this fails, only some memory leaks.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn failed(call: &'static str) -> impl FnOnce(NvrtcError) -> CudaError {
    move |error| CudaError::Nvrtc { call, code: format!("{:?}", error.0) }
}
