# Runs at each build: writes OUTPUT from TEMPLATE, touching it only when the commit has changed.
execute_process(
  COMMAND git -C ${SOURCE_DIR} describe --always --abbrev=12 --dirty --exclude=*
  OUTPUT_VARIABLE K3_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT K3_COMMIT)
  set(K3_COMMIT "unknown")
endif()
configure_file(${TEMPLATE} ${OUTPUT} @ONLY)
