# Runs the example (-DPROGRAM=...) on a few lines and compares what it writes; a missing vocabulary must be an error.
set(folder "${CMAKE_CURRENT_BINARY_DIR}")
file(WRITE "${folder}/vocab.txt" "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\n,\nun\n##aff\n##able\n")
file(WRITE "${folder}/text.txt" "Hello, unaffable\n\nxyz [MASK]\n")
set(expected "[CLS] hello(0-5) ,(5-6) un(7-9) ##aff(9-12) ##able(12-16) [SEP]\n[CLS] [SEP]\n[CLS] [UNK](0-3) [MASK](4-10) [SEP]\n")

execute_process(COMMAND "${PROGRAM}" "${folder}/vocab.txt" INPUT_FILE "${folder}/text.txt"
                OUTPUT_VARIABLE output RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT output STREQUAL expected)
  message(FATAL_ERROR "exit ${status}; expected\n${expected}got\n${output}")
endif()
execute_process(COMMAND "${PROGRAM}" "${folder}/none.txt" INPUT_FILE "${folder}/text.txt"
                OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE status)
if(NOT status EQUAL 1 OR NOT error MATCHES "^tokenize_lines: vocab: cannot open ")
  message(FATAL_ERROR "no vocabulary: expected exit 1 and a message, got exit ${status}: ${error}")
endif()
